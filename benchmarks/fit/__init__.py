"""What a fit costs against the number of rows, beside peers: seconds and scores in one run on one machine."""
