//! `kubectl-tessera`, the plugin of kubectl: see the library.

use std::process::ExitCode;

#[tokio::main]
async fn main() -> ExitCode {
    tessera_cli::run::main().await
}
