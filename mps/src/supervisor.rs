//! Supervises one MPS control daemon per shared GPU and publishes its status.
//!
//! ```text
//! tick --> wanted::read --> plan::plan --> steps --> start, check health, quit, kill, remove
//! event (daemon exited or answered) --> phase --^          |
//!                                         ^                |
//!                                         +--- async tasks +
//! ```
//!
//! Everything runs on the main thread, because a daemon is killed when the thread that started it
//! exits ([`crate::enter`]).

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    io,
    path::PathBuf,
    time::{Duration, Instant},
};

use tessera_api::names::GpuUuid;
use tessera_runtime::error_chain::chain;
use tokio::{
    sync::mpsc,
    time::{MissedTickBehavior, interval, sleep},
};
use tokio_util::sync::CancellationToken;

use crate::{
    backoff::Backoff,
    cleanup,
    control::{Control, ControlError, HEALTH_CHECK, QUIT},
    daemon::{DaemonExit, DaemonProcess},
    directory::{self, DirectoryError},
    log_tail,
    plan::{AfterExit, DaemonStep, DesiredState, KillReason, Phase, plan},
    shm::ShmSize,
};
use tessera_mps_protocol::{
    layout::MpsPaths,
    lock::SupervisorLock,
    status::{MpsDaemonState, MpsDaemonStatus},
    wanted,
};

/// Pause between health checks of a daemon that has not answered yet, and between attempts to
/// remove processes.
const RETRY: Duration = Duration::from_millis(200);

/// Time that a stopping supervisor waits for the processes of its daemons to exit.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(2);

const PREVIOUS_EXITED: &str = "the daemon exited with the previous tessera-mps";
const STOPPED: &str = "tessera-mps was stopped";
const UNWANTED: &str = "the daemon is stopping: no claim uses it";

/// Error that stops the supervisor.
#[derive(Debug, thiserror::Error)]
pub enum SupervisorError {
    /// The supervisor's lock file cannot be opened or locked.
    #[error("cannot lock `{path}`", path = .path.display())]
    Lock {
        /// Path of the lock file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The existing daemon directories cannot be listed.
    #[error("cannot list MPS daemon directories")]
    Directories(#[from] DirectoryError),
}

/// Configuration of the supervisor.
#[derive(Clone, Debug)]
pub struct SupervisorSettings {
    /// State directory of tessera-driver.
    pub state_dir: PathBuf,
    /// Root of the NVIDIA driver's files.
    pub driver_root: PathBuf,
    /// NVIDIA's MPS control program.
    pub mps_control: OsString,
    /// True if one daemon serves the processes of all users.
    pub multi_user: bool,
    /// Maximum size of the `/dev/shm` that the tenants of one GPU share.
    pub shm_size: ShmSize,
    /// Interval between reads of the GPUs for which tessera-driver requests a daemon.
    pub poll_interval: Duration,
    /// Interval between health checks of a ready daemon.
    pub health_interval: Duration,
    /// Timeout of a health check.
    pub answer_timeout: Duration,
    /// Timeout of a daemon's first answer.
    pub start_timeout: Duration,
    /// Timeout of a daemon's exit after `quit`.
    pub stop_timeout: Duration,
}

/// Supervises the daemons until `stop` is cancelled, then stops all of them.
///
/// # Errors
/// Returns [`SupervisorError`]. Errors of a single daemon are published in its status.
pub async fn supervise(
    settings: SupervisorSettings,
    stop: CancellationToken,
) -> Result<(), SupervisorError> {
    let paths = MpsPaths::new(&settings.state_dir);
    let Some(_lock) = lock(&paths, settings.poll_interval, &stop).await? else { return Ok(()) };
    let (sender, mut events) = mpsc::unbounded_channel();
    let mut supervisor = MpsSupervisor::new(settings, paths, sender)?;
    // The previous supervisor's daemons were killed with it.
    supervisor.publish_failed_for_all(PREVIOUS_EXITED);
    let mut ticks = interval(supervisor.settings.poll_interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while !(stop.is_cancelled() && supervisor.is_idle()) {
        supervisor.advance(stop.is_cancelled());
        tokio::select! {
            _ = ticks.tick() => {}
            () = stop.cancelled(), if !stop.is_cancelled() => {}
            Some(event) = events.recv() => supervisor.handle(event),
        }
    }
    supervisor.shut_down().await;
    Ok(())
}

/// Waits for the lock; returns `None` after `stop`.
///
/// The lock may be held by a supervisor that is stopping, or by a process that tests it.
async fn lock(
    paths: &MpsPaths,
    pause: Duration,
    stop: &CancellationToken,
) -> Result<Option<SupervisorLock>, SupervisorError> {
    let mut logged = false;
    while !stop.is_cancelled() {
        let failed = |source| SupervisorError::Lock { path: paths.lock(), source };
        if let Some(lock) = SupervisorLock::acquire(paths).map_err(failed)? {
            return Ok(Some(lock));
        }
        if !std::mem::replace(&mut logged, true) {
            tracing::info!(path = %paths.lock().display(), "waiting for another tessera-mps to exit");
        }
        tokio::select! {
            () = sleep(pause) => {}
            () = stop.cancelled() => {}
        }
    }
    Ok(None)
}

/// Event of one daemon.
struct DaemonEvent {
    gpu: GpuUuid,
    /// Number of the start that the event belongs to, among all starts of this supervisor.
    start: u64,
    kind: DaemonEventKind,
}

enum DaemonEventKind {
    HealthChecked(Result<(), ControlError>),
    QuitSent(Result<(), ControlError>),
    Exited(DaemonExit),
}

/// State of one daemon.
struct DaemonState {
    phase: Phase,
    /// Number of starts since the directory was created.
    starts: u64,
    /// Number of the last start, among all starts of this supervisor. Events of other starts are
    /// stale.
    start: u64,
    backoff: Backoff,
    ready_since: Option<Instant>,
    process: Option<DaemonProcess>,
    /// Last failure; empty once the daemon is ready.
    failure: String,
    /// Status on disk; `None` if there is none.
    published: Option<MpsDaemonStatus>,
    /// Status that could not be written.
    unpublished: Option<MpsDaemonStatus>,
}

impl DaemonState {
    /// Returns the state of a daemon that is not running and may be started now.
    fn down(starts: u64) -> Self {
        Self {
            phase: Phase::Down { start_at: Instant::now() },
            starts,
            start: 0,
            backoff: Backoff::default(),
            ready_since: None,
            process: None,
            failure: String::new(),
            published: None,
            unpublished: None,
        }
    }
}

impl DaemonState {
    /// Writes a status. If that fails, removes the old status, which would be out of date.
    fn publish(&mut self, paths: &MpsPaths, gpu: &GpuUuid, status: MpsDaemonStatus) {
        let Err(error) = status.write(paths, gpu) else {
            (self.published, self.unpublished) = (Some(status), None);
            return;
        };
        if self.unpublished.as_ref() != Some(&status) {
            tracing::warn!(%gpu, error = %chain(&error), "cannot publish MPS daemon status");
        }
        if let Err(error) = MpsDaemonStatus::remove(paths, gpu) {
            tracing::warn!(%gpu, error = %chain(&error), "cannot remove outdated MPS daemon status");
        }
        (self.published, self.unpublished) = (None, Some(status));
    }
}

/// Error that prevents the start of a daemon.
#[derive(Debug, thiserror::Error)]
enum StartError {
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    #[error("processes of the previous daemon are still running")]
    Orphans,
    #[error("cannot start the daemon")]
    Io(#[from] io::Error),
}

struct MpsSupervisor {
    settings: SupervisorSettings,
    paths: MpsPaths,
    control: Control,
    daemons: BTreeMap<GpuUuid, DaemonState>,
    /// GPUs that were wanted at the last successful read.
    wanted: BTreeSet<GpuUuid>,
    /// Invalid names that were already logged.
    logged_names: BTreeSet<OsString>,
    /// Number of starts of all daemons.
    starts: u64,
    events: mpsc::UnboundedSender<DaemonEvent>,
}

impl MpsSupervisor {
    /// Returns a supervisor that takes over the existing daemon directories.
    fn new(
        settings: SupervisorSettings,
        paths: MpsPaths,
        events: mpsc::UnboundedSender<DaemonEvent>,
    ) -> Result<Self, SupervisorError> {
        let control = Control {
            paths: paths.clone(),
            program: settings.mps_control.clone(),
            driver_root: settings.driver_root.clone(),
            multi_user: settings.multi_user,
            answer_timeout: settings.answer_timeout,
        };
        let starts = |gpu: &GpuUuid| {
            MpsDaemonStatus::read(&paths, gpu).ok().flatten().map_or(0, |status| status.starts)
        };
        let existing = directory::list(&paths)?;
        let daemons = existing
            .into_iter()
            .map(|gpu| (gpu.clone(), DaemonState::down(starts(&gpu))))
            .collect();
        let (wanted, logged_names) = Default::default();
        Ok(Self { settings, paths, control, daemons, wanted, logged_names, starts: 0, events })
    }

    /// Returns true if no daemon process may be running.
    fn is_idle(&self) -> bool {
        self.daemons.values().all(|daemon| !daemon.phase.is_running())
    }

    /// Executes the steps that are due.
    fn advance(&mut self, stop: bool) {
        self.publish_pending();
        let desired = if stop { DesiredState::Stop } else { DesiredState::Run(self.read_wanted()) };
        let phases = self.daemons.iter().map(|(gpu, daemon)| (gpu.clone(), daemon.phase)).collect();
        for (gpu, step) in plan(Instant::now(), &desired, &phases) {
            match step {
                DaemonStep::Start => self.start(&gpu),
                DaemonStep::CheckHealth => self.check_health(&gpu),
                DaemonStep::Quit(after) => self.quit(&gpu, after),
                DaemonStep::Kill(reason, after) => self.kill(&gpu, reason, after),
                DaemonStep::Remove => self.remove(&gpu),
            }
        }
    }

    /// Returns the wanted GPUs. Returns the last known ones if the directory cannot be read, so
    /// that a read error stops no daemon.
    fn read_wanted(&mut self) -> BTreeSet<GpuUuid> {
        match wanted::read_wanted_gpus(&self.paths) {
            Ok(wanted) => {
                for name in wanted.invalid_names.difference(&self.logged_names) {
                    tracing::warn!(?name, directory = %self.paths.wanted().display(), "ignoring file that is not named after a GPU");
                }
                self.logged_names = wanted.invalid_names;
                self.wanted = wanted.gpus;
            }
            Err(error) => tracing::warn!(%error, "cannot read wanted MPS daemons"),
        }
        self.wanted.clone()
    }

    fn start(&mut self, gpu: &GpuUuid) {
        self.daemons.entry(gpu.clone()).or_insert_with(|| DaemonState::down(0));
        self.starts += 1;
        let started = self.try_start(gpu, self.starts);
        let Some(daemon) = self.daemons.get_mut(gpu) else { return };
        daemon.start = self.starts;
        let now = Instant::now();
        match started {
            Ok(process) => {
                daemon.starts += 1;
                tracing::info!(%gpu, pid = process.pid, start = daemon.starts, "started MPS daemon");
                daemon.process = Some(process);
                daemon.ready_since = None;
                daemon.phase = Phase::Starting {
                    kill_at: now + self.settings.start_timeout,
                    check_at: Some(now),
                };
                let failure = daemon.failure.clone();
                self.publish(gpu, MpsDaemonState::Starting, failure);
            }
            Err(StartError::Orphans) => {
                daemon.phase = Phase::Down { start_at: now + RETRY };
                self.publish(gpu, MpsDaemonState::Failed, StartError::Orphans.to_string());
            }
            Err(error) => self.record_failure(gpu, chain(&error)),
        }
    }

    fn try_start(&self, gpu: &GpuUuid, start: u64) -> Result<DaemonProcess, StartError> {
        directory::create_all(&self.paths, gpu, self.settings.shm_size)?;
        let mark = cleanup::mark(&self.paths.daemon(gpu))?;
        if cleanup::kill_orphans(&self.paths.daemon(gpu))? > 0 {
            return Err(StartError::Orphans);
        }
        directory::tidy(&self.paths, gpu)?;
        let (events, event_gpu) = (self.events.clone(), gpu.clone());
        let on_exit = move |exit| {
            let kind = DaemonEventKind::Exited(exit);
            drop(events.send(DaemonEvent { gpu: event_gpu, start, kind }));
        };
        Ok(DaemonProcess::start(self.control.daemon(gpu, &mark), on_exit)?)
    }

    fn check_health(&mut self, gpu: &GpuUuid) {
        let Some(daemon) = self.daemons.get_mut(gpu) else { return };
        match &mut daemon.phase {
            Phase::Starting { check_at, .. } | Phase::Ready { check_at, .. } => *check_at = None,
            _ => return,
        }
        self.send_command(gpu, HEALTH_CHECK, DaemonEventKind::HealthChecked);
    }

    fn quit(&mut self, gpu: &GpuUuid, after: AfterExit) {
        let before = self.daemons.get(gpu).and_then(|daemon| daemon.published.clone());
        self.publish(
            gpu,
            MpsDaemonState::Failed,
            if after == AfterExit::Keep { STOPPED } else { UNWANTED }.to_owned(),
        );
        // tessera-driver writes the wanted file first and reads the status second. Here the order
        // is reversed, so one of the two sees the other's write, and no container gets a daemon
        // that is about to quit.
        if let (AfterExit::Remove, true, Some(before)) =
            (after, self.paths.wanted_file(gpu).exists(), before)
        {
            return self.publish(gpu, before.state, before.message);
        }
        let Some(daemon) = self.daemons.get_mut(gpu) else { return };
        daemon.phase =
            Phase::Quitting { kill_at: Instant::now() + self.settings.stop_timeout, after };
        tracing::info!(%gpu, "stopping MPS daemon");
        self.send_command(gpu, QUIT, DaemonEventKind::QuitSent);
    }

    fn send_command(
        &self,
        gpu: &GpuUuid,
        command: &'static str,
        event: impl FnOnce(Result<(), ControlError>) -> DaemonEventKind + Send + 'static,
    ) {
        let Some(start) = self.daemons.get(gpu).map(|daemon| daemon.start) else { return };
        let (control, events, gpu) = (self.control.clone(), self.events.clone(), gpu.clone());
        tokio::spawn(async move {
            let kind = event(control.send(&gpu, command).await);
            drop(events.send(DaemonEvent { gpu, start, kind }));
        });
    }

    fn kill(&mut self, gpu: &GpuUuid, reason: KillReason, after: AfterExit) {
        let Some(daemon) = self.daemons.get_mut(gpu) else { return };
        daemon.failure = match reason {
            KillReason::StartTimeout => {
                format!("the daemon did not answer within {:?}", self.settings.start_timeout)
            }
            KillReason::Unresponsive => {
                "the daemon did not answer several times in a row".to_owned()
            }
            KillReason::StopTimeout => {
                format!("the daemon did not quit within {:?}", self.settings.stop_timeout)
            }
        };
        tracing::warn!(%gpu, reason = daemon.failure, "killing MPS daemon");
        daemon.phase = Phase::Killed { after };
        if let Some(process) = &daemon.process {
            process.kill();
        }
        let failure = daemon.failure.clone();
        self.publish(gpu, MpsDaemonState::Failed, failure);
    }

    fn remove(&mut self, gpu: &GpuUuid) {
        let Some(daemon) = self.daemons.get_mut(gpu) else { return };
        // The directory stays until they are gone: a new daemon of the same name must not be
        // confused with them.
        if cleanup::kill_orphans(&self.paths.daemon(gpu)).unwrap_or(0) > 0 {
            daemon.phase = Phase::Removing { retry_at: Instant::now() + RETRY };
            return;
        }
        match directory::remove(&self.paths, gpu) {
            Ok(()) => {
                tracing::info!(%gpu, "removed MPS daemon directory");
                self.daemons.remove(gpu);
            }
            Err(error) => {
                let pause = daemon.backoff.pause(Duration::ZERO);
                daemon.phase = Phase::Removing { retry_at: Instant::now() + pause };
                tracing::warn!(%gpu, error = %chain(&error), "cannot remove MPS daemon directory");
            }
        }
    }

    fn handle(&mut self, DaemonEvent { gpu, start, kind }: DaemonEvent) {
        // An answer may arrive after the daemon has exited.
        if self.daemons.get(&gpu).is_none_or(|daemon| daemon.start != start) {
            return;
        }
        match kind {
            DaemonEventKind::HealthChecked(answer) => self.health_checked(&gpu, answer),
            DaemonEventKind::QuitSent(answer) => self.quit_sent(&gpu, answer),
            DaemonEventKind::Exited(exit) => self.exited(&gpu, &exit),
        }
    }

    fn health_checked(&mut self, gpu: &GpuUuid, answer: Result<(), ControlError>) {
        let Some(daemon) = self.daemons.get_mut(gpu) else { return };
        let now = Instant::now();
        let next = now + self.settings.health_interval;
        match (&mut daemon.phase, answer) {
            (Phase::Starting { .. }, Ok(())) => {
                daemon.phase = Phase::Ready { check_at: Some(next), missed_checks: 0 };
                daemon.ready_since = Some(now);
                daemon.failure.clear();
                tracing::info!(%gpu, "MPS daemon is ready");
                self.publish(gpu, MpsDaemonState::Ready, String::new());
            }
            (Phase::Starting { check_at, .. }, Err(error)) => {
                tracing::debug!(%gpu, error = %chain(&error), "MPS daemon is not ready yet");
                *check_at = Some(now + RETRY);
            }
            (Phase::Ready { check_at, missed_checks }, Ok(())) => {
                (*check_at, *missed_checks) = (Some(next), 0)
            }
            (Phase::Ready { check_at, missed_checks }, Err(error)) => {
                tracing::warn!(%gpu, error = %chain(&error), "MPS daemon failed health check");
                (*check_at, *missed_checks) = (Some(next), *missed_checks + 1);
            }
            _ => {}
        }
    }

    fn quit_sent(&mut self, gpu: &GpuUuid, answer: Result<(), ControlError>) {
        let (Some(daemon), Err(error)) = (self.daemons.get_mut(gpu), answer) else { return };
        if let Phase::Quitting { kill_at, .. } = &mut daemon.phase {
            // A daemon that did not receive the command will not quit.
            tracing::debug!(%gpu, error = %chain(&error), "cannot send quit to MPS daemon");
            *kill_at = Instant::now();
        }
    }

    fn exited(&mut self, gpu: &GpuUuid, exit: &DaemonExit) {
        let Some(daemon) = self.daemons.get_mut(gpu) else { return };
        daemon.process = None;
        if let Err(error) = cleanup::kill_orphans(&self.paths.daemon(gpu)) {
            tracing::warn!(%gpu, %error, "cannot search for orphaned MPS servers");
        }
        match daemon.phase {
            Phase::Quitting { after: AfterExit::Remove, .. }
            | Phase::Killed { after: AfterExit::Remove } => {
                tracing::info!(%gpu, "stopped unused MPS daemon");
                daemon.phase = Phase::Removing { retry_at: Instant::now() };
            }
            Phase::Quitting { after: AfterExit::Keep, .. }
            | Phase::Killed { after: AfterExit::Keep } => {
                tracing::info!(%gpu, "stopped MPS daemon because tessera-mps is stopping");
                daemon.phase = Phase::Down { start_at: Instant::now() };
            }
            phase => {
                let killed = matches!(phase, Phase::Killed { .. }).then(|| daemon.failure.clone());
                let log = log_tail::read(&self.paths.log(gpu).join("control.log"));
                self.record_failure(gpu, exit.reason(killed, &log));
            }
        }
    }

    /// Publishes a failure and schedules the next start.
    fn record_failure(&mut self, gpu: &GpuUuid, failure: String) {
        let Some(daemon) = self.daemons.get_mut(gpu) else { return };
        let now = Instant::now();
        let ready = daemon.ready_since.take().map_or(Duration::ZERO, |since| now - since);
        let pause = daemon.backoff.pause(ready);
        daemon.phase = Phase::Down { start_at: now + pause };
        daemon.failure.clone_from(&failure);
        tracing::warn!(%gpu, failure, retry_in = ?pause, "MPS daemon failed");
        self.publish(gpu, MpsDaemonState::Failed, failure);
    }

    /// Writes a status, unless the file already has it.
    fn publish(&mut self, gpu: &GpuUuid, state: MpsDaemonState, message: String) {
        let Some(daemon) = self.daemons.get_mut(gpu) else { return };
        let status = MpsDaemonStatus { state, message, starts: daemon.starts };
        if daemon.published.as_ref() != Some(&status) {
            daemon.publish(&self.paths, gpu, status);
        }
    }

    /// Writes the statuses that could not be written before.
    fn publish_pending(&mut self) {
        for (gpu, daemon) in &mut self.daemons {
            if let Some(status) = daemon.unpublished.clone() {
                daemon.publish(&self.paths, gpu, status);
            }
        }
    }

    /// Waits until no process of a daemon is left, then publishes the failure of all.
    async fn shut_down(mut self) {
        for gpu in self.daemons.keys() {
            cleanup::kill_orphans_until_gone(&self.paths.daemon(gpu), CLEANUP_TIMEOUT).await;
        }
        self.publish_failed_for_all(STOPPED);
    }

    fn publish_failed_for_all(&mut self, failure: &str) {
        for gpu in self.daemons.keys().cloned().collect::<Vec<_>>() {
            self.publish(&gpu, MpsDaemonState::Failed, failure.to_owned());
        }
    }
}

#[cfg(test)]
mod tests;
