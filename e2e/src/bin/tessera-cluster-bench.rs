//! `tessera-cluster-bench`, the program behind `e2e/cluster/bench.sh`. The script starts a control
//! plane for each round; this program plans the rounds, runs one, and compares the results.

use std::io::Read;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand, ValueEnum};
use kube::{Client, Config};
use tessera_e2e::throughput::plan::{Allocator, Limits, Rounds, Workload};
use tessera_e2e::throughput::report::{Machine, Report};
use tessera_e2e::throughput::round::{self, RoundParameters};

/// Commands used by e2e/cluster/bench.sh.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Measure the pods per second that a real control plane binds on hollow nodes: Tessera
    /// compared with kube-scheduler alone.
    ///
    /// etcd, kube-apiserver, kube-controller-manager and kube-scheduler are started for each round
    /// in their own namespaces. Needs root, and Go for the first build. Standard output contains
    /// only the tables or JSON.
    #[command(override_usage = "e2e/cluster/bench.sh [OPTIONS]")]
    Plan(Options),
    /// Run one round on the cluster of $KUBECONFIG and print it as a line of JSON.
    Round(RoundOptions),
    /// Read rounds from standard input, one per line, and compare them.
    Report(Options),
}

#[derive(Debug, Args)]
struct Options {
    #[command(flatten)]
    workload: Workload,
    #[command(flatten)]
    rounds: Rounds,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
}

#[derive(Debug, Args)]
struct RoundOptions {
    #[command(flatten)]
    options: Options,
    /// Allocator of the devices.
    #[arg(long)]
    allocator: Allocator,
    /// Client limits with which kube-controller-manager and kube-scheduler were started.
    #[arg(long)]
    limit: Limits,
    /// Directory of files named after components that contain their process IDs.
    #[arg(long, value_name = "DIRECTORY")]
    pids: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    /// Tables.
    Table,
    /// One object with all rounds.
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
            let parameters =
                RoundParameters { allocator, limits: limit, workload: options.workload };
            let round = round::run(parameters, &client, &pids).await?;
            println!("{}", serde_json::to_string(&round)?);
        }
        Command::Report(options) => {
            let mut lines = String::new();
            std::io::stdin().read_to_string(&mut lines)?;
            let report = Report::from_lines(Machine::this(), &lines)?;
            match options.output {
                Output::Table => print!("{report}"),
                Output::Json => println!("{}", serde_json::to_string_pretty(&report)?),
            }
        }
    }
    Ok(())
}
