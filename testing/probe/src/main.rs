//! `tessera-probe`: says which GPUs a program sees, takes memory until refused, and holds it.
//!
//! ```text
//!  see  -> {"event":"see", ...}
//!  fill -> see, {"event":"filled", ...} [, {"event":"holding"} until SIGTERM]
//!  fill --compute-ms N -> see, {"event":"computed", ...}, {"event":"filled", ...}
//!  hold -> see, {"event":"holding","takenBytes":n} until SIGTERM
//!  --tamper HOW ... -> {"event":"tampered", ...} before anything else
//! ```
//!
//! One JSON object a line, flushed. It links neither CUDA nor NVML: like most programs it opens
//! `libcuda.so.1` and `libnvidia-ml.so.1` when it runs, and looks its functions up by name.

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
    let args = args::Args::parse();
    let outcome = signals::block().and_then(|signals| args.run(&signals));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            report::say(&report::Event::Error(failure));
            ExitCode::FAILURE
        }
    }
}
