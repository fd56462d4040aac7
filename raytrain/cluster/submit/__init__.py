"""Runs a job on a cluster: `upload` lists what is sent, `jobs` talks to the dashboard, `follow` follows it to its end."""
