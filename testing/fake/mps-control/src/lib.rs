//! A stand-in for `nvidia-cuda-mps-control`, without a GPU.
//!
//! ```text
//!  fake-mps-control -f          the daemon ----- $CUDA_MPS_PIPE_DIRECTORY/control <---+-- fake-mps-control < commands
//!                                  |            (nvidia-cuda-mps-control.pid beside)  |
//!                                  v                                                  +-- clients: `client pid=.. uid=.. ...`
//!                        $CUDA_MPS_LOG_DIRECTORY/control.log                              until they close the connection
//! ```
//!
//! Lines go to the daemon, and each is answered with text that ends in [`protocol::END`]. NVIDIA's
//! own protocol is not public; nothing but this crate speaks this one. Unlike NVIDIA's, the daemon
//! serves clients itself: there is no server process, and clients of different users are served
//! side by side, with `-M` and without.
//!
//! For tests of those who run it, the variable `FAKE_MPS_FAIL` makes the daemon fail: `start`, at
//! once, with a line in the log; `hang`, by answering nobody.

#![forbid(unsafe_code)]

pub mod client;
pub mod daemon;
pub mod environment;
pub mod front_end;
mod log;
pub mod protocol;
