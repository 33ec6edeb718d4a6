"""Tables of the user's, standard splits, one protocol: the library beside its peers. `lastlayer bench uci --data DIR`."""
