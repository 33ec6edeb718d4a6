"""Cost of a fit against the number of rows, beside peers: seconds and scores from one run on one machine."""
