"""The library beside its peers on tables of the user's, by one protocol: `lastlayer bench uci --data DIR`."""
