"""An ensemble of networks: which rows each leaves out, training them, and what they say of the rows left out."""
