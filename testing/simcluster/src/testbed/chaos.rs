//! Fault plans on a test bed, and the clocks of its programs.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use tessera_simcluster::api::User;
use tessera_simcluster::chaos::{FaultCounts, FaultKind, FaultPlan, Injector};
use tokio::task::JoinHandle;

use super::TestBed;
use super::process::ProcessSpec;
use super::programs::Programs;

/// A running fault plan, or its counts.
pub(crate) struct Chaos {
    task: JoinHandle<std::io::Result<()>>,
    report: tokio::sync::watch::Receiver<Option<FaultCounts>>,
}

/// Gives the program a wall clock set by the file, initially correct.
pub(crate) fn with_clock(
    spec: ProcessSpec,
    programs: &Programs,
    clock: &Path,
) -> anyhow::Result<ProcessSpec> {
    std::fs::write(clock, 0_i64.to_ne_bytes())
        .with_context(|| format!("cannot write `{}`", clock.display()))?;
    Ok(spec.variable("LD_PRELOAD", &programs.fake_clock).variable("TESSERA_FAKE_CLOCK", clock))
}

impl TestBed {
    /// Returns the administrator's kubeconfig for the observer port, where no faults are injected.
    pub(crate) fn observer_kubeconfig(&self) -> String {
        self.cluster.api().observer_kubeconfig(&User::admin())
    }

    /// Starts the fault plan of `seed`.
    pub(crate) fn begin_chaos(&mut self, seed: u64, seconds: u64) -> anyhow::Result<()> {
        anyhow::ensure!(
            self.chaos.is_none(),
            "another fault plan exists; remove it with `chaos end`"
        );
        let clocks = self.nodes.iter().map(|node| format!("{}/driver.clock", node.name()));
        let clocks =
            clocks.chain(["controller.clock".to_owned()]).map(|file| self.directory.join(file));
        let clocks: Vec<_> = clocks.filter(|file| file.is_file()).collect();
        anyhow::ensure!(!clocks.is_empty(), "no adjustable clock: run `serve` with --clocks");
        let plan = FaultPlan::from_seed(seed, Duration::from_secs(seconds));
        let injector = Injector::new(self.cluster.api().clone(), plan, clocks);
        let (sender, report) = tokio::sync::watch::channel(None);
        let task = tokio::spawn(async move {
            sender.send_replace(Some(injector.run().await?));
            Ok(())
        });
        self.chaos = Some(Chaos { task, report });
        Ok(())
    }

    /// Returns one line per kind of fault with its count, or nothing while the plan runs.
    pub(crate) fn chaos_report(&self) -> anyhow::Result<String> {
        let chaos = self.chaos.as_ref().context("no fault plan was started")?;
        let report = chaos.report.borrow();
        let Some(report) = report.as_ref() else {
            anyhow::ensure!(!chaos.task.is_finished(), "the fault plan failed");
            return Ok(String::new());
        };
        let line = |kind: &FaultKind| {
            format!("{kind:?} {}\n", report.get(kind).copied().unwrap_or_default())
        };
        Ok(FaultKind::ALL.iter().map(line).collect())
    }

    /// Removes a finished plan.
    pub(crate) fn end_chaos(&mut self) -> anyhow::Result<()> {
        let chaos = self.chaos.as_ref().context("no fault plan was started")?;
        anyhow::ensure!(chaos.task.is_finished(), "the fault plan is still running");
        self.chaos = None;
        Ok(())
    }

    /// Restarts the programs that exited by themselves.
    pub(crate) fn restart_exited(&mut self) -> anyhow::Result<()> {
        self.controller.restart_if_exited()?;
        self.nodes.iter_mut().try_for_each(|node| node.driver.restart_if_exited())
    }

    /// Sets the wall clock of a program, in seconds ahead of the machine's.
    pub(crate) fn set_clock(&self, file: &str, seconds: i64) -> anyhow::Result<()> {
        let path = self.directory.join(file);
        // Written in place, since the program has the file mapped.
        let file = std::fs::File::options().write(true).open(&path);
        let file = file.with_context(|| {
            format!("cannot open `{}`: run `serve` with --clocks", path.display())
        })?;
        Ok(file.write_all_at(&seconds.to_ne_bytes(), 0)?)
    }
}
