//! `tessera-probe`: reports the GPUs that a program sees, allocates memory until the limit, and
//! holds it.
//!
//! ```text
//!  see  -> {"event":"see", ...}
//!  fill -> see, {"event":"filled", ...} [, {"event":"holding"} until SIGTERM]
//!  fill --compute-ms N -> see, {"event":"computed", ...}, {"event":"filled", ...}
//!  hold -> see, {"event":"holding","takenBytes":n} until SIGTERM
//!  --tamper HOW ... -> {"event":"tampered", ...} before anything else
//! ```
//!
//! Prints one JSON object per line and flushes it. It links neither CUDA nor NVML: like most
//! programs it opens `libcuda.so.1` and `libnvidia-ml.so.1` at run time, and finds functions by
//! name.

mod args;
mod compute;
mod cuda;
mod library;
mod memory;
mod nvml;
mod report;
mod signals;
mod tamper;

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    let args = args::ProbeArgs::parse();
    let outcome = signals::block().and_then(|signals| args.run(&signals));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            report::report(&report::Event::Error(failure));
            ExitCode::FAILURE
        }
    }
}
