"""What several ranks do for a layer or a model, installed from outside of them."""
