//! Faults by plan on a stage, and the clocks of its programs.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use tessera_simcluster::api::User;
use tessera_simcluster::chaos::{FaultPlan, Injector, Kind, Report};
use tokio::task::JoinHandle;

use super::Stage;
use super::process::ProcessSpec;
use super::programs::Programs;

/// Faults at work, or their report.
pub(crate) struct Chaos {
    task: JoinHandle<std::io::Result<()>>,
    report: tokio::sync::watch::Receiver<Option<Report>>,
}

/// The program with a wall clock that the file sets; it is right at first.
pub(crate) fn with_clock(
    spec: ProcessSpec,
    programs: &Programs,
    clock: &Path,
) -> anyhow::Result<ProcessSpec> {
    std::fs::write(clock, 0_i64.to_ne_bytes())
        .with_context(|| format!("failed to write `{}`", clock.display()))?;
    Ok(spec.variable("LD_PRELOAD", &programs.fake_clock).variable("TESSERA_FAKE_CLOCK", clock))
}

impl Stage {
    /// Everything as the administrator, by an entrance that no fault touches.
    pub(crate) fn observer_kubeconfig(&self) -> String {
        self.cluster.api().observer_kubeconfig(&User::admin())
    }

    /// Begins to go through the plan of `seed`.
    pub(crate) fn begin_chaos(&mut self, seed: u64, seconds: u64) -> anyhow::Result<()> {
        anyhow::ensure!(self.chaos.is_none(), "another plan is at work; `chaos end` ends it");
        let clocks = self.machines.iter().map(|machine| format!("{}/driver.clock", machine.name()));
        let clocks =
            clocks.chain(["controller.clock".to_owned()]).map(|file| self.directory.join(file));
        let clocks: Vec<_> = clocks.filter(|file| file.is_file()).collect();
        anyhow::ensure!(!clocks.is_empty(), "no clock can be set: serve with --clocks");
        let plan = FaultPlan::from_seed(seed, Duration::from_secs(seconds));
        let injector = Injector::new(self.cluster.api().clone(), plan, clocks);
        let (teller, report) = tokio::sync::watch::channel(None);
        let task = tokio::spawn(async move {
            teller.send_replace(Some(injector.run().await?));
            Ok(())
        });
        self.chaos = Some(Chaos { task, report });
        Ok(())
    }

    /// One line for each kind of fault, with how often it has happened; nothing while the plan is
    /// at work.
    pub(crate) fn chaos_report(&self) -> anyhow::Result<String> {
        let chaos = self.chaos.as_ref().context("no plan was begun")?;
        let report = chaos.report.borrow();
        let Some(report) = report.as_ref() else {
            anyhow::ensure!(!chaos.task.is_finished(), "the plan ended early");
            return Ok(String::new());
        };
        let line =
            |kind: &Kind| format!("{kind:?} {}\n", report.get(kind).copied().unwrap_or_default());
        Ok(Kind::ALL.iter().map(line).collect())
    }

    /// Forgets the plan that was gone through.
    pub(crate) fn end_chaos(&mut self) -> anyhow::Result<()> {
        let chaos = self.chaos.as_ref().context("no plan was begun")?;
        anyhow::ensure!(chaos.task.is_finished(), "the plan is still at work");
        self.chaos = None;
        Ok(())
    }

    /// Starts what has ended by itself.
    pub(crate) fn revive(&mut self) -> anyhow::Result<()> {
        self.controller.revive()?;
        self.machines.iter_mut().try_for_each(|machine| machine.driver.revive())
    }

    /// Sets the wall clock of a program, in seconds ahead of the machine's.
    pub(crate) fn set_clock(&self, file: &str, seconds: i64) -> anyhow::Result<()> {
        let path = self.directory.join(file);
        // In place: the program has the file mapped.
        let file = std::fs::File::options().write(true).open(&path);
        let file = file.with_context(|| format!("no `{}`: serve with --clocks", path.display()))?;
        Ok(file.write_all_at(&seconds.to_ne_bytes(), 0)?)
    }
}
