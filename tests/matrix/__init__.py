"""Networks of public libraries × what an ensemble has to do: the compatibility matrix."""
