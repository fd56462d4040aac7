"""Ray Train's controller and worker group, changed so that workers are lost and join without restarting the others."""
