"""Where the numbers of each step are shown while a run goes on; config.logging.trackers names modules of this folder, or
dotted paths of others."""
