"""`keylane demo`: the main job on real flights, with a consumer and a broker killed on the way."""
