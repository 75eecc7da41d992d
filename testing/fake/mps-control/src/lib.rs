//! Fake of `nvidia-cuda-mps-control` that needs no GPU.
//!
//! ```text
//!  fake-mps-control -f          the daemon ----- $CUDA_MPS_PIPE_DIRECTORY/control <---+-- fake-mps-control < commands
//!                                  |            (nvidia-cuda-mps-control.pid beside)  |
//!                                  v                                                  +-- clients: `client pid=.. uid=.. ...`
//!                        $CUDA_MPS_LOG_DIRECTORY/control.log                              until they close the connection
//! ```
//!
//! Requests are lines, and each is answered with text that ends in [`protocol::END`]. NVIDIA's own
//! protocol is not public; only this crate uses this one. Unlike NVIDIA's, the daemon serves
//! clients itself: there is no server process, and clients of different users are served at the
//! same time, with and without `-M`.
//!
//! Tests can make the daemon fail with the variable `FAKE_MPS_FAIL`: with `start` it exits at once
//! with a line in the log, with `hang` it answers no request.

#![forbid(unsafe_code)]

pub mod client;
pub mod daemon;
pub mod environment;
pub mod front_end;
mod log;
pub mod protocol;
