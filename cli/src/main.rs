//! `kubectl-tessera`: see the library.

use std::process::ExitCode;

#[tokio::main]
async fn main() -> ExitCode {
    tessera_cli::run::main().await
}
