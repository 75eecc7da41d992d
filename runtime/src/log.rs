//! Log output. `--log-format` sets the format, `RUST_LOG` the level (default: `info`).

use std::io::{self, IsTerminal};

use clap::ValueEnum;
use tracing_subscriber::EnvFilter;

/// Format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Human-readable text.
    Text,
    /// One JSON object per line.
    Json,
}

/// Initializes logging to stderr.
///
/// # Panics
/// If called twice in a process.
pub fn start(format: LogFormat) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    // No colours in the log of a pod. On a terminal, NO_COLOR decides.
    let builder = if io::stderr().is_terminal() { builder } else { builder.with_ansi(false) };
    match format {
        LogFormat::Text => builder.init(),
        LogFormat::Json => builder.json().init(),
    }
}
