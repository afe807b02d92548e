"""`keylane demo`: processes real flight data while a consumer and a broker are killed."""
