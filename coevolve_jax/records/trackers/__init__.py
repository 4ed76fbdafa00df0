"""Trackers show each step's numbers during a run.

config.logging.trackers names modules of this folder, or dotted paths of others.
"""
