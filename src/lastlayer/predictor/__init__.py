"""What a fitted model is, and the predictive formula: everything that predicts holds a `Fitted`."""
