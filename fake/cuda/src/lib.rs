//! A fake libcuda.so.1 over the fake world.
