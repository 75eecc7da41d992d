//! From the command line to the exit code.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use k8s_openapi::jiff::Timestamp;
use tessera_allocator::Settings;
use tessera_api::names::{ClaimName, Namespace, PodName};

use crate::args::{
    Args, Command, ConnectionArgs, ExplainArgs, Kind, PolicyName, SimulateArgs, SnapshotArgs,
    SourceArgs, TreeArgs,
};
use crate::cluster::Cluster;
use crate::explain::View;
use crate::output::render;
use crate::snapshot::Snapshot;
use crate::{explain, simulate, tree};

/// How the program ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// All is well.
    Well,
    /// The pod or claim has to wait, or a pod does not fit.
    Waits,
}

/// Reads the command line and does what it says.
pub async fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => {
            // Help and version are no errors. clap's own code for errors, 2, means something else
            // here.
            let code = if error.use_stderr() { 1 } else { 0 };
            let _ = error.print();
            return ExitCode::from(code);
        }
    };
    match run(args).await {
        Ok((text, exit)) => match std::io::stdout().write_all(text.as_bytes()) {
            // Whoever reads has seen enough.
            Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => fail(&error.into()),
            _ => ExitCode::from(if exit == Exit::Well { 0 } else { 2 }),
        },
        Err(error) => fail(&error),
    }
}

fn fail(error: &anyhow::Error) -> ExitCode {
    eprintln!("error: {error:#}");
    ExitCode::from(1)
}

/// Does what the command line says. Gives what goes to the standard output.
async fn run(args: Args) -> anyhow::Result<(String, Exit)> {
    let Args { command, connection } = args;
    match command {
        Command::Tree(args) => show_tree(args, &connection).await,
        Command::Explain(args) => explain(args, &connection).await,
        Command::Simulate(args) => simulate(args, &connection).await,
        Command::Snapshot(args) => save(args, &connection).await,
    }
}

/// What is looked at.
struct Source {
    snapshot: Snapshot,
    /// None where it is a file.
    cluster: Option<Cluster>,
    /// The moment that it shows.
    now: Timestamp,
}

impl Source {
    async fn open(source: &SourceArgs, connection: &ConnectionArgs) -> anyhow::Result<Self> {
        if let Some(path) = &source.snapshot {
            let snapshot = Snapshot::load(path)?;
            let now = snapshot.taken_at;
            return Ok(Self { snapshot, cluster: None, now });
        }
        let cluster = Cluster::connect(&connection.target()).await?;
        let snapshot = cluster.read().await?;
        Ok(Self { snapshot, cluster: Some(cluster), now: Timestamp::now() })
    }

    /// The namespace that is meant.
    fn namespace(&self, connection: &ConnectionArgs) -> anyhow::Result<Namespace> {
        let context = self.cluster.as_ref().map(Cluster::namespace);
        let name = connection.namespace.as_deref().or(context).unwrap_or("default");
        Namespace::new(name).context("--namespace is no name of a namespace")
    }

    /// The picture, with a word about objects that cannot be read.
    fn picture(&self) -> crate::snapshot::Picture {
        let picture = self.snapshot.picture();
        for problem in &picture.unusable {
            eprintln!("warning: left out: {problem}");
        }
        picture
    }
}

async fn show_tree(args: TreeArgs, connection: &ConnectionArgs) -> anyhow::Result<(String, Exit)> {
    let source = Source::open(&args.source, connection).await?;
    let namespace =
        connection.namespace.as_ref().map(|_| source.namespace(connection)).transpose()?;
    let filter = tree::Filter { nodes: args.nodes.iter().cloned().collect(), namespace };
    let seen = tree::look(&source.picture().index, &filter);
    let unknown = args.nodes.iter().find(|name| !seen.nodes.iter().any(|node| node.name == **name));
    if let Some(unknown) = unknown.filter(|_| filter.namespace.is_none()) {
        anyhow::bail!(
            "node `{unknown}` publishes no GPUs through Tessera; `kubectl tessera tree` shows those that do"
        );
    }
    let headers = !args.output.no_headers;
    let text = |seen: &tree::Tree| {
        if args.claims { tree::claims(seen, headers) } else { tree::tree(seen, headers) }
    };
    Ok((render(&seen, args.output.output, text)?, Exit::Well))
}

async fn explain(args: ExplainArgs, connection: &ConnectionArgs) -> anyhow::Result<(String, Exit)> {
    let source = Source::open(&args.source, connection).await?;
    let namespace = source.namespace(connection)?;
    let picture = source.picture();
    let view = View::new(&source.snapshot, &picture, PolicyName::settings(None), source.now);
    let (text, waits) = match args.kind {
        Kind::Pod => {
            let name = PodName::new(&args.name).context("NAME is no name of a Pod")?;
            let events = match &source.cluster {
                Some(cluster) => cluster.events(namespace.as_str(), "Pod", name.as_str()).await,
                None => Vec::new(),
            };
            let report = explain::pod(&view, &namespace, &name, &events)?;
            let text =
                render(&report, args.output, |report| explain::pod_text(report, source.now))?;
            (text, report.state.waits())
        }
        Kind::Claim => {
            let name = ClaimName::new(&args.name).context("NAME is no name of a ResourceClaim")?;
            let report = explain::claim(&view, &namespace, &name)?;
            let text =
                render(&report, args.output, |report| explain::claim_text(report, source.now))?;
            (text, report.waits)
        }
    };
    Ok((text, if waits { Exit::Waits } else { Exit::Well }))
}

async fn simulate(
    args: SimulateArgs,
    connection: &ConnectionArgs,
) -> anyhow::Result<(String, Exit)> {
    let manifests = read_all(&args.files)?;
    let source = Source::open(&args.source, connection).await?;
    let namespace = source.namespace(connection)?;
    let settings = Settings { seed: args.seed, ..PolicyName::settings(args.policy) };
    let result = simulate::simulate(&source.snapshot, &manifests, &namespace, settings)
        .with_context(|| format!("cannot use {}", names(&args.files)))?;
    let headers = !args.output.no_headers;
    let text = render(&result, args.output.output, |result| simulate::text(result, headers))?;
    Ok((text, if result.lacks_room() { Exit::Waits } else { Exit::Well }))
}

async fn save(args: SnapshotArgs, connection: &ConnectionArgs) -> anyhow::Result<(String, Exit)> {
    let snapshot = Cluster::connect(&connection.target()).await?.read().await?;
    for not in &snapshot.not_read {
        eprintln!("warning: {} are not in the snapshot: {}", not.resource, not.because);
    }
    match &args.output {
        Some(path) => snapshot.save(path)?,
        None => {
            let mut text = Vec::new();
            snapshot.write_to(&mut text).context("cannot write the snapshot")?;
            return Ok((String::from_utf8(text).context("JSON is UTF-8")?, Exit::Well));
        }
    }
    Ok((String::new(), Exit::Well))
}

/// The documents of all files.
fn read_all(files: &[PathBuf]) -> anyhow::Result<String> {
    let mut all = String::new();
    for path in files {
        let text = read(path).with_context(|| format!("cannot read {}", path.display()))?;
        // A separator between two files; at the end of one it is one too many, which is no
        // document.
        all.push_str(&text);
        all.push_str("\n---\n");
    }
    Ok(all)
}

fn read(path: &Path) -> std::io::Result<String> {
    if path == Path::new("-") {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text)?;
        return Ok(text);
    }
    std::fs::read_to_string(path)
}

fn names(files: &[PathBuf]) -> String {
    files.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}
