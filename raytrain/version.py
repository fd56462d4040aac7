"""The version of raytrain, also where it is not installed: a job's working directory is all that workers have of it."""

VERSION = "0.1.0"
