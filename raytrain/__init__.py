"""Elastic PyTorch training on Ray: workers come and go, and the result does not change."""
