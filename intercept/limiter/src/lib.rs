//! The interceptor's accounting as a pure machine.
