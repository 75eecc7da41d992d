//! A fake libnvidia-ml.so.1 over the fake world.
