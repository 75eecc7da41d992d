//! `tessera-cluster-bench`: what `e2e/cluster/bench.sh` runs. The script starts a control plane for
//! each round; this says which rounds, does what is done in one, and compares them.

use std::io::Read;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand, ValueEnum};
use kube::{Client, Config};
use tessera_e2e::throughput::plan::{Allocator, Limits, Rounds, Workload};
use tessera_e2e::throughput::report::{Machine, Report};
use tessera_e2e::throughput::round::{self, Task};

/// The parts of e2e/cluster/bench.sh.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// How many pods a real control plane binds per second on nodes without kubelets: Tessera
    /// beside kube-scheduler alone.
    ///
    /// etcd, kube-apiserver, kube-controller-manager and kube-scheduler are started anew for each
    /// round, in namespaces of their own. Needs root, and Go for the first build. Writes
    /// nothing but the tables, or JSON, to standard output.
    #[command(override_usage = "e2e/cluster/bench.sh [OPTIONS]")]
    Plan(Options),
    /// Runs one round on the cluster of $KUBECONFIG and prints it as a line of JSON.
    Round(RoundOptions),
    /// Reads rounds from standard input, one a line, and compares them.
    Report(Options),
}

#[derive(Debug, Args)]
struct Options {
    #[command(flatten)]
    workload: Workload,
    #[command(flatten)]
    rounds: Rounds,
    /// How the result is printed.
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
}

#[derive(Debug, Args)]
struct RoundOptions {
    #[command(flatten)]
    options: Options,
    /// Who allocates.
    #[arg(long)]
    allocator: Allocator,
    /// The limits that kube-controller-manager and kube-scheduler were started with.
    #[arg(long)]
    limit: Limits,
    /// A directory of files that are named as components and hold their process numbers.
    #[arg(long, value_name = "DIRECTORY")]
    pids: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    /// Tables for people.
    Table,
    /// One object, with every round.
    Json,
}

#[tokio::main]
async fn main() -> ExitCode {
    match run(Arguments::parse().command).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tessera-cluster-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Plan(options) => {
            options.workload.check()?;
            for (allocator, limits) in options.rounds.in_order() {
                println!("{allocator} {limits}");
            }
        }
        Command::Round(RoundOptions { options, allocator, limit, pids }) => {
            let _ = rustls::crypto::ring::default_provider().install_default();
            let client = Client::try_from(Config::infer().await?)?;
            let task = Task { allocator, limits: limit, workload: options.workload };
            let round = round::run(task, &client, &pids).await?;
            println!("{}", serde_json::to_string(&round)?);
        }
        Command::Report(options) => {
            let mut lines = String::new();
            std::io::stdin().read_to_string(&mut lines)?;
            let report = Report::of_lines(Machine::this(), &lines)?;
            match options.output {
                Output::Table => print!("{report}"),
                Output::Json => println!("{}", serde_json::to_string_pretty(&report)?),
            }
        }
    }
    Ok(())
}
