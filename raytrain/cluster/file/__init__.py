"""The file that `ray up` or `kubectl apply` turns into a cluster: written from a few settings, and checked offline."""
