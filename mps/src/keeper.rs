//! The loop that keeps the daemons: it alone knows how they are, and says so.
//!
//! ```text
//!  tick --> wanted::read --> plan::plan --> steps --> start, ask, quit, kill, remove
//!  event (a daemon ended, or answered) --> phase ---^             |
//!                                            ^                    |
//!                                            +--- tasks that wait +
//! ```
//!
//! All of it runs on the main thread: daemons die with the thread that has started them
//! ([`crate::enter`]).

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
    control::{Control, ControlError, QUESTION, QUIT},
    daemon::{Daemon, End},
    directory::{self, DirectoryError},
    log_tail,
    plan::{Phase, Step, Then, Why, Wish, plan},
    remnants,
    shm::ShmSize,
};
use tessera_mps_protocol::{
    layout::MpsPaths,
    lock::KeeperLock,
    status::{State, Status},
    wanted,
};

/// Between questions to a daemon that has not answered yet, and between looks at what does not go
/// away.
const RETRY: Duration = Duration::from_millis(200);

/// How long a keeper that stops waits for what its daemons leave.
const LAST_LOOK: Duration = Duration::from_secs(2);

const LEFT: &str = "the daemon ended with the keeper before this one";
const STOPPED: &str = "the keeper was stopped";
const UNWANTED: &str = "the daemon quits: nobody wants it any more";

/// Why there is no keeper.
#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    /// Nobody can be kept from keeping the same daemons.
    #[error("failed to lock `{path}`", path = .path.display())]
    Lock {
        /// The lock.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// It is not known what there is.
    #[error("the daemons' directories cannot be read")]
    Directories(#[from] DirectoryError),
}

/// What the keeper goes by.
#[derive(Clone, Debug)]
pub struct Settings {
    /// tessera-driver's.
    pub state_dir: PathBuf,
    /// Root of the NVIDIA driver's files.
    pub driver_root: PathBuf,
    /// NVIDIA's program.
    pub mps_control: OsString,
    /// Whether daemons serve all users at once.
    pub multi_user: bool,
    /// What tenants of a GPU have in `/dev/shm` at most.
    pub shm_size: ShmSize,
    /// Between looks at what is wanted.
    pub poll_interval: Duration,
    /// Between questions to a daemon that is ready.
    pub health_interval: Duration,
    /// For an answer.
    pub answer_timeout: Duration,
    /// For a daemon's first answer.
    pub start_timeout: Duration,
    /// For a daemon to quit.
    pub stop_timeout: Duration,
}

/// Keeps the daemons until `stop`, and leaves none.
///
/// # Errors
/// [`KeeperError`]. What goes wrong with a daemon is in its status.
pub async fn keep(settings: Settings, stop: CancellationToken) -> Result<(), KeeperError> {
    let paths = MpsPaths::new(&settings.state_dir);
    let Some(_lock) = lock(&paths, settings.poll_interval, &stop).await? else { return Ok(()) };
    let (sender, mut events) = mpsc::unbounded_channel();
    let mut keeper = Keeper::new(settings, paths, sender)?;
    // What an earlier keeper has said of its daemons, which died with it.
    keeper.say_of_all(LEFT);
    let mut looks = interval(keeper.settings.poll_interval);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while !(stop.is_cancelled() && keeper.is_idle()) {
        keeper.advance(stop.is_cancelled());
        tokio::select! {
            _ = looks.tick() => {}
            () = stop.cancelled(), if !stop.is_cancelled() => {}
            Some(event) = events.recv() => keeper.take(event),
        }
    }
    keeper.leave().await;
    Ok(())
}

/// Waits for the lock: there may be a keeper that stops, or somebody who looks whether there is
/// one. `None` after `stop`.
async fn lock(
    paths: &MpsPaths,
    pause: Duration,
    stop: &CancellationToken,
) -> Result<Option<KeeperLock>, KeeperError> {
    let mut said = false;
    while !stop.is_cancelled() {
        let failed = |source| KeeperError::Lock { path: paths.lock(), source };
        if let Some(lock) = KeeperLock::take(paths).map_err(failed)? {
            return Ok(Some(lock));
        }
        if !std::mem::replace(&mut said, true) {
            tracing::info!(lock = %paths.lock().display(), "waiting for another keeper to end");
        }
        tokio::select! {
            () = sleep(pause) => {}
            () = stop.cancelled() => {}
        }
    }
    Ok(None)
}

/// Something that happened to a daemon.
struct Event {
    gpu: GpuUuid,
    /// Which start it belongs to, of all that the keeper has made.
    start: u64,
    what: Happened,
}

enum Happened {
    Answered(Result<(), ControlError>),
    ToldToQuit(Result<(), ControlError>),
    Ended(End),
}

/// What is known of one daemon.
struct Kept {
    phase: Phase,
    /// How often it was started.
    starts: u64,
    /// Its last start, by its number among all of the keeper's. What belongs to another comes too
    /// late.
    start: u64,
    backoff: Backoff,
    ready_since: Option<Instant>,
    daemon: Option<Daemon>,
    /// What went wrong last; empty once it is ready.
    failure: String,
    /// What its status says; `None` where there is none.
    said: Option<Status>,
    /// What could not be said.
    unsaid: Option<Status>,
}

impl Kept {
    /// A daemon that does not run, and may be started now.
    fn down(starts: u64) -> Self {
        Self {
            phase: Phase::Down { until: Instant::now() },
            starts,
            start: 0,
            backoff: Backoff::default(),
            ready_since: None,
            daemon: None,
            failure: String::new(),
            said: None,
            unsaid: None,
        }
    }
}

impl Kept {
    /// Writes a status. Where it cannot be, there is none: one of before would be taken for this
    /// one.
    fn say(&mut self, paths: &MpsPaths, gpu: &GpuUuid, status: Status) {
        let Err(error) = status.write(paths, gpu) else {
            (self.said, self.unsaid) = (Some(status), None);
            return;
        };
        if self.unsaid.as_ref() != Some(&status) {
            tracing::warn!(%gpu, error = %chain(&error), "nobody can be told how an MPS daemon is");
        }
        if let Err(error) = Status::remove(paths, gpu) {
            tracing::warn!(%gpu, error = %chain(&error), "the status of an MPS daemon is not true any more");
        }
        (self.said, self.unsaid) = (None, Some(status));
    }
}

/// Why a daemon is not started.
#[derive(Debug, thiserror::Error)]
enum StartError {
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    #[error("processes of the daemon that was here before do not end")]
    Remnants,
    #[error("the daemon cannot be started")]
    Io(#[from] io::Error),
}

struct Keeper {
    settings: Settings,
    paths: MpsPaths,
    control: Control,
    kept: BTreeMap<GpuUuid, Kept>,
    /// What was wanted when it was last readable.
    wanted: BTreeSet<GpuUuid>,
    /// Names that were complained about.
    foreign: BTreeSet<OsString>,
    /// How often any daemon was started.
    starts: u64,
    events: mpsc::UnboundedSender<Event>,
}

impl Keeper {
    /// Goes on with what another has left.
    fn new(
        settings: Settings,
        paths: MpsPaths,
        events: mpsc::UnboundedSender<Event>,
    ) -> Result<Self, KeeperError> {
        let control = Control {
            paths: paths.clone(),
            program: settings.mps_control.clone(),
            driver_root: settings.driver_root.clone(),
            multi_user: settings.multi_user,
            patience: settings.answer_timeout,
        };
        let starts = |gpu: &GpuUuid| {
            Status::read(&paths, gpu).ok().flatten().map_or(0, |status| status.starts)
        };
        let left = directory::list(&paths)?;
        let kept = left.into_iter().map(|gpu| (gpu.clone(), Kept::down(starts(&gpu)))).collect();
        let (wanted, foreign) = Default::default();
        Ok(Self { settings, paths, control, kept, wanted, foreign, starts: 0, events })
    }

    /// Whether no process may be left.
    fn is_idle(&self) -> bool {
        self.kept.values().all(|kept| !kept.phase.is_running())
    }

    /// Does what is to be done now.
    fn advance(&mut self, stop: bool) {
        self.say_again();
        let wish = if stop { Wish::Stop } else { Wish::Run(self.look()) };
        let phases = self.kept.iter().map(|(gpu, kept)| (gpu.clone(), kept.phase)).collect();
        for (gpu, step) in plan(Instant::now(), &wish, &phases) {
            match step {
                Step::Start => self.start(&gpu),
                Step::Ask => self.ask(&gpu),
                Step::Quit(then) => self.quit(&gpu, then),
                Step::Kill(why, then) => self.kill(&gpu, why, then),
                Step::Remove => self.remove(&gpu),
            }
        }
    }

    /// What is wanted. If that cannot be read, what was: nobody's daemon ends because of that.
    fn look(&mut self) -> BTreeSet<GpuUuid> {
        match wanted::read(&self.paths) {
            Ok(wanted) => {
                for name in wanted.foreign.difference(&self.foreign) {
                    tracing::warn!(?name, directory = %self.paths.wanted().display(), "no GPU has such a UUID: ignored");
                }
                self.foreign = wanted.foreign;
                self.wanted = wanted.gpus;
            }
            Err(error) => tracing::warn!(%error, "what is wanted cannot be read"),
        }
        self.wanted.clone()
    }

    fn start(&mut self, gpu: &GpuUuid) {
        self.kept.entry(gpu.clone()).or_insert_with(|| Kept::down(0));
        self.starts += 1;
        let started = self.try_start(gpu, self.starts);
        let Some(kept) = self.kept.get_mut(gpu) else { return };
        kept.start = self.starts;
        let now = Instant::now();
        match started {
            Ok(daemon) => {
                kept.starts += 1;
                tracing::info!(%gpu, pid = daemon.pid, start = kept.starts, "an MPS daemon starts");
                kept.daemon = Some(daemon);
                kept.ready_since = None;
                kept.phase = Phase::Starting {
                    kill_at: now + self.settings.start_timeout,
                    ask_at: Some(now),
                };
                let failure = kept.failure.clone();
                self.say(gpu, State::Starting, failure);
            }
            Err(StartError::Remnants) => {
                kept.phase = Phase::Down { until: now + RETRY };
                self.say(gpu, State::Failed, StartError::Remnants.to_string());
            }
            Err(error) => self.fail(gpu, chain(&error)),
        }
    }

    fn try_start(&self, gpu: &GpuUuid, start: u64) -> Result<Daemon, StartError> {
        directory::make(&self.paths, gpu, self.settings.shm_size)?;
        let mark = remnants::mark(&self.paths.daemon(gpu))?;
        if remnants::kill(&self.paths.daemon(gpu))? > 0 {
            return Err(StartError::Remnants);
        }
        directory::tidy(&self.paths, gpu)?;
        let (events, of) = (self.events.clone(), gpu.clone());
        let ended =
            move |end| drop(events.send(Event { gpu: of, start, what: Happened::Ended(end) }));
        Ok(Daemon::start(self.control.daemon(gpu, &mark), ended)?)
    }

    fn ask(&mut self, gpu: &GpuUuid) {
        let Some(kept) = self.kept.get_mut(gpu) else { return };
        match &mut kept.phase {
            Phase::Starting { ask_at, .. } | Phase::Ready { ask_at, .. } => *ask_at = None,
            _ => return,
        }
        self.converse(gpu, QUESTION, Happened::Answered);
    }

    fn quit(&mut self, gpu: &GpuUuid, then: Then) {
        let before = self.kept.get(gpu).and_then(|kept| kept.said.clone());
        self.say(
            gpu,
            State::Failed,
            if then == Then::Leave { STOPPED } else { UNWANTED }.to_owned(),
        );
        // tessera-driver wants first and reads the status then; here it is the other way round. So
        // one of the two sees the other, and nobody is given a daemon that is about to
        // quit.
        if let (Then::Remove, true, Some(before)) =
            (then, self.paths.wanted_of(gpu).exists(), before)
        {
            return self.say(gpu, before.state, before.message);
        }
        let Some(kept) = self.kept.get_mut(gpu) else { return };
        kept.phase = Phase::Quitting { kill_at: Instant::now() + self.settings.stop_timeout, then };
        tracing::info!(%gpu, "an MPS daemon is told to quit");
        self.converse(gpu, QUIT, Happened::ToldToQuit);
    }

    fn converse(
        &self,
        gpu: &GpuUuid,
        words: &'static str,
        happened: impl FnOnce(Result<(), ControlError>) -> Happened + Send + 'static,
    ) {
        let Some(start) = self.kept.get(gpu).map(|kept| kept.start) else { return };
        let (control, events, gpu) = (self.control.clone(), self.events.clone(), gpu.clone());
        tokio::spawn(async move {
            let what = happened(control.say(&gpu, words).await);
            drop(events.send(Event { gpu, start, what }));
        });
    }

    fn kill(&mut self, gpu: &GpuUuid, why: Why, then: Then) {
        let Some(kept) = self.kept.get_mut(gpu) else { return };
        kept.failure = match why {
            Why::NeverAnswered => {
                format!("the daemon did not answer within {:?}", self.settings.start_timeout)
            }
            Why::Silent => "the daemon did not answer several times in a row".to_owned(),
            Why::DoesNotQuit => {
                format!("the daemon did not quit within {:?}", self.settings.stop_timeout)
            }
        };
        tracing::warn!(%gpu, reason = kept.failure, "an MPS daemon is killed");
        kept.phase = Phase::Killed { then };
        if let Some(daemon) = &kept.daemon {
            daemon.kill();
        }
        let failure = kept.failure.clone();
        self.say(gpu, State::Failed, failure);
    }

    fn remove(&mut self, gpu: &GpuUuid) {
        let Some(kept) = self.kept.get_mut(gpu) else { return };
        // Until they are gone, for their name is not to mean another daemon.
        if remnants::kill(&self.paths.daemon(gpu)).unwrap_or(0) > 0 {
            kept.phase = Phase::Doomed { until: Instant::now() + RETRY };
            return;
        }
        match directory::remove(&self.paths, gpu) {
            Ok(()) => {
                tracing::info!(%gpu, "what belonged to an MPS daemon is removed");
                self.kept.remove(gpu);
            }
            Err(error) => {
                let pause = kept.backoff.pause(Duration::ZERO);
                kept.phase = Phase::Doomed { until: Instant::now() + pause };
                tracing::warn!(%gpu, error = %chain(&error), "what belonged to an MPS daemon cannot be removed");
            }
        }
    }

    fn take(&mut self, Event { gpu, start, what }: Event) {
        // An answer may come after the end of who gave it.
        if self.kept.get(&gpu).is_none_or(|kept| kept.start != start) {
            return;
        }
        match what {
            Happened::Answered(answer) => self.answered(&gpu, answer),
            Happened::ToldToQuit(answer) => self.told_to_quit(&gpu, answer),
            Happened::Ended(end) => self.ended(&gpu, &end),
        }
    }

    fn answered(&mut self, gpu: &GpuUuid, answer: Result<(), ControlError>) {
        let Some(kept) = self.kept.get_mut(gpu) else { return };
        let now = Instant::now();
        let next = now + self.settings.health_interval;
        match (&mut kept.phase, answer) {
            (Phase::Starting { .. }, Ok(())) => {
                kept.phase = Phase::Ready { ask_at: Some(next), silences: 0 };
                kept.ready_since = Some(now);
                kept.failure.clear();
                tracing::info!(%gpu, "an MPS daemon is ready");
                self.say(gpu, State::Ready, String::new());
            }
            (Phase::Starting { ask_at, .. }, Err(error)) => {
                tracing::debug!(%gpu, error = %chain(&error), "an MPS daemon does not answer yet");
                *ask_at = Some(now + RETRY);
            }
            (Phase::Ready { ask_at, silences }, Ok(())) => (*ask_at, *silences) = (Some(next), 0),
            (Phase::Ready { ask_at, silences }, Err(error)) => {
                tracing::warn!(%gpu, error = %chain(&error), "an MPS daemon does not answer");
                (*ask_at, *silences) = (Some(next), *silences + 1);
            }
            _ => {}
        }
    }

    fn told_to_quit(&mut self, gpu: &GpuUuid, answer: Result<(), ControlError>) {
        let (Some(kept), Err(error)) = (self.kept.get_mut(gpu), answer) else { return };
        if let Phase::Quitting { kill_at, .. } = &mut kept.phase {
            // Who has not heard it will not quit.
            tracing::debug!(%gpu, error = %chain(&error), "an MPS daemon cannot be told to quit");
            *kill_at = Instant::now();
        }
    }

    fn ended(&mut self, gpu: &GpuUuid, end: &End) {
        let Some(kept) = self.kept.get_mut(gpu) else { return };
        kept.daemon = None;
        if let Err(error) = remnants::kill(&self.paths.daemon(gpu)) {
            tracing::warn!(%gpu, %error, "servers of an MPS daemon cannot be looked for");
        }
        match kept.phase {
            Phase::Quitting { then: Then::Remove, .. } | Phase::Killed { then: Then::Remove } => {
                tracing::info!(%gpu, "an MPS daemon has stopped: nobody wants it");
                kept.phase = Phase::Doomed { until: Instant::now() };
            }
            Phase::Quitting { then: Then::Leave, .. } | Phase::Killed { then: Then::Leave } => {
                tracing::info!(%gpu, "an MPS daemon has stopped with the keeper");
                kept.phase = Phase::Down { until: Instant::now() };
            }
            phase => {
                let killed = matches!(phase, Phase::Killed { .. }).then(|| kept.failure.clone());
                let log = log_tail::read(&self.paths.log(gpu).join("control.log"));
                self.fail(gpu, end.reason(killed, &log));
            }
        }
    }

    /// Says that a daemon does not run, and has it started again after a while.
    fn fail(&mut self, gpu: &GpuUuid, failure: String) {
        let Some(kept) = self.kept.get_mut(gpu) else { return };
        let now = Instant::now();
        let ready = kept.ready_since.take().map_or(Duration::ZERO, |since| now - since);
        let pause = kept.backoff.pause(ready);
        kept.phase = Phase::Down { until: now + pause };
        kept.failure.clone_from(&failure);
        tracing::warn!(%gpu, failure, again_in = ?pause, "an MPS daemon has failed");
        self.say(gpu, State::Failed, failure);
    }

    /// Writes a status, unless it says that already.
    fn say(&mut self, gpu: &GpuUuid, state: State, message: String) {
        let Some(kept) = self.kept.get_mut(gpu) else { return };
        let status = Status { state, message, starts: kept.starts };
        if kept.said.as_ref() != Some(&status) {
            kept.say(&self.paths, gpu, status);
        }
    }

    /// Says what could not be said before.
    fn say_again(&mut self) {
        for (gpu, kept) in &mut self.kept {
            if let Some(status) = kept.unsaid.clone() {
                kept.say(&self.paths, gpu, status);
            }
        }
    }

    /// Waits for what is left of all, and says that they do not run.
    async fn leave(mut self) {
        for gpu in self.kept.keys() {
            remnants::end(&self.paths.daemon(gpu), LAST_LOOK).await;
        }
        self.say_of_all(STOPPED);
    }

    fn say_of_all(&mut self, failure: &str) {
        for gpu in self.kept.keys().cloned().collect::<Vec<_>>() {
            self.say(&gpu, State::Failed, failure.to_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn gpu() -> GpuUuid {
        GpuUuid::new("GPU-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77").expect("a UUID")
    }

    /// One that can start nothing, for there can be no directories.
    fn keeper(directory: &tempfile::TempDir) -> Keeper {
        let settings = Settings {
            state_dir: directory.path().to_owned(),
            driver_root: "/".into(),
            mps_control: "true".into(),
            multi_user: true,
            shm_size: ShmSize::default(),
            poll_interval: Duration::from_secs(1),
            health_interval: Duration::from_secs(1),
            answer_timeout: Duration::from_secs(1),
            start_timeout: Duration::from_secs(1),
            stop_timeout: Duration::from_secs(1),
        };
        let paths = MpsPaths::new(directory.path());
        fs::create_dir_all(paths.root()).expect("made");
        let keeper = Keeper::new(settings, paths.clone(), mpsc::unbounded_channel().0)
            .expect("there are none");
        fs::write(paths.daemons(), "").expect("written");
        keeper
    }

    #[test]
    fn an_answer_of_a_daemon_that_was_removed_is_not_that_of_the_next() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut keeper = keeper(&directory);
        let answer = |start| Event { gpu: gpu(), start, what: Happened::Answered(Ok(())) };
        let mut begin = || {
            keeper.kept.remove(&gpu());
            keeper.start(&gpu());
            let kept = keeper.kept.get_mut(&gpu()).expect("known");
            kept.phase = Phase::Starting { kill_at: Instant::now(), ask_at: None };
            kept.start
        };
        let [first, second] = [begin(), begin()];
        keeper.take(answer(first));
        assert!(matches!(keeper.kept[&gpu()].phase, Phase::Starting { .. }), "it comes too late");
        keeper.take(answer(second));
        assert!(matches!(keeper.kept[&gpu()].phase, Phase::Ready { .. }));
    }

    #[test]
    fn one_that_fails_again_is_tried_again_later() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut keeper = keeper(&directory);
        keeper.kept.insert(gpu(), Kept::down(0));
        for seconds in [1, 2, 4] {
            let before = Instant::now();
            keeper.fail(&gpu(), "no GPU".to_owned());
            let Phase::Down { until } = keeper.kept[&gpu()].phase else {
                panic!("it does not run")
            };
            assert!(until >= before + Duration::from_secs(seconds));
        }
    }

    #[test]
    fn a_status_that_cannot_be_written_is_none_until_it_can() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut keeper = keeper(&directory);
        let paths = keeper.paths.clone();
        keeper.kept.insert(gpu(), Kept::down(1));
        let read = || Status::read(&paths, &gpu()).expect("whole").map(|status| status.state);
        fs::remove_file(paths.daemons()).expect("there");
        fs::create_dir_all(paths.daemon(&gpu())).expect("made");
        keeper.say(&gpu(), State::Ready, String::new());
        assert_eq!(read(), Some(State::Ready));
        // Nothing can be written where there is no directory.
        fs::remove_dir_all(paths.daemon(&gpu())).expect("there");
        keeper.say(&gpu(), State::Failed, "it ended".to_owned());
        assert_eq!(read(), None);
        keeper.advance(true);
        assert_eq!(read(), None);
        fs::create_dir_all(paths.daemon(&gpu())).expect("made");
        keeper.advance(true);
        assert_eq!(read(), Some(State::Failed));
    }
}
