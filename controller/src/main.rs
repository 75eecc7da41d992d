//! `tessera-controller`: see the library.

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    tessera_controller::Args::parse_and_run().await
}
