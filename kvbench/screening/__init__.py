"""The screen of a new pair: a policy fixed beforehand, stages that stop at the first that settles the matter, a verdict."""
