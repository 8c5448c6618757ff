"""What a model is made of, whatever its family: its variables, its layers, and the precision they are made in."""
