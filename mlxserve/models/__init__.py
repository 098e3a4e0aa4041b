"""From a model's name to its definition with weights: finding, fetching, checking, loading."""
