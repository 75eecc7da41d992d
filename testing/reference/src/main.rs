//! `tessera-reference`: see the library.

use std::path::PathBuf;

use clap::Parser as _;
use tessera_reference::pages;

/// Writes the generated pages of docs/reference; `make reference` runs it.
#[derive(clap::Parser)]
struct ReferenceArgs {
    /// Root of the repository.
    #[arg(long, default_value = ".")]
    root: PathBuf,
}

fn main() -> anyhow::Result<()> {
    let args = ReferenceArgs::parse();
    for page in pages(&args.root)? {
        page.write(&args.root)?;
    }
    Ok(())
}
