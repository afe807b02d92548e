"""`keylane demo`: the main job on real flights, during which a consumer and a broker are killed."""
