"""What serves a call: traced graphs with their inputs fed, decoders, engines and caches."""
