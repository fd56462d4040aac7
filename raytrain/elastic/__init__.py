"""Ray Train's controller and worker group, changed so that a worker can be lost or join without restarting the others."""
