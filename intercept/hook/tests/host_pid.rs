//! Processes learn what the host calls them, where somebody tells them, and notice nothing where
//! nobody does.

mod container;

use std::collections::BTreeSet;
use std::fs;
use std::io::Write as _;
use std::net::Shutdown;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use container::{GIB, MIB, Node, NodeShare, can_contain, probe, program};
use tessera_intercept_abi::host_pid::{SOCKET, answer};

/// In the driver's place: answers every connection in some way, and remembers who came.
struct Host {
    directory: PathBuf,
    callers: Arc<Mutex<Vec<u32>>>,
    serves: Option<JoinHandle<()>>,
}

impl Host {
    /// Takes the socket's name, whoever had it before.
    fn answering(directory: &Path, answer: impl Fn(&mut UnixStream, u32) + Send + 'static) -> Self {
        let new = directory.join("new");
        let listener = UnixListener::bind(&new).expect("bound");
        fs::rename(&new, directory.join(SOCKET)).expect("renamed");
        let callers = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&callers);
        let serves = thread::spawn(move || {
            hurry();
            let mut kept = Vec::new();
            for connection in listener.incoming() {
                let mut connection = connection.expect("a connection");
                let pid = peer(&connection);
                if pid == std::process::id() {
                    return;
                }
                seen.lock().expect("no panic").push(pid);
                answer(&mut connection, pid);
                // What is closed would say that there is no more to come.
                kept.push(connection);
            }
        });
        Self { directory: directory.to_owned(), callers, serves: Some(serves) }
    }

    fn callers(&self) -> Vec<u32> {
        self.callers.lock().expect("no panic").clone()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // The test's own connection ends it.
        let _ = UnixStream::connect(self.directory.join(SOCKET));
        let ended = self.serves.take().expect("serves").join();
        assert!(ended.is_ok() || thread::panicking(), "the host serves");
    }
}

/// This thread goes before all that are scheduled in the usual way, where that is allowed: whoever
/// asks waits for a fifth of a second only, and the machine may be busy.
fn hurry() {
    let first = libc::sched_param { sched_priority: 1 };
    // SAFETY: 0 is the calling thread, and the parameter lives.
    unsafe {
        libc::sched_setscheduler(0, libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, &raw const first)
    };
}

/// Who is at the other end, as the kernel says.
fn peer(connection: &UnixStream) -> u32 {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: an open socket, and room for what it says.
    let code = unsafe {
        libc::getsockopt(
            connection.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut length,
        )
    };
    assert_eq!(code, 0, "the kernel says");
    u32::try_from(peer.pid).expect("a process")
}

fn tell(connection: &mut UnixStream, pid: u32) {
    // Who did not wait so long has closed it.
    let _ = connection.write_all(&answer(pid));
}

/// What the slots say, by slot.
fn told(share: &NodeShare) -> Vec<Option<u32>> {
    share.ledger(|ledger| ledger.processes().map(|process| process.host_pid).collect())
}

/// The process in its own namespace, and the namespace, as this one sees it.
fn own_pid(host_pid: u32) -> (u32, u64) {
    let status = fs::read_to_string(format!("/proc/{host_pid}/status")).expect("it lives");
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:")).expect("a line");
    let namespace = fs::read_link(format!("/proc/{host_pid}/ns/pid")).expect("it lives");
    let namespace =
        namespace.to_str().expect("text").trim_matches(|c: char| !c.is_ascii_digit()).to_owned();
    (
        line.split_whitespace().last().expect("a number").parse().expect("a number"),
        namespace.parse().expect("a number"),
    )
}

#[test]
fn a_slot_says_what_the_host_calls_its_process() {
    if !can_contain("a_slot_says_what_the_host_calls_its_process") {
        return;
    }
    let node = Node::new();
    let host = Host::answering(&node.host(), tell);
    let shares = ["claim-0", "claim-1"].map(|id| node.share(id, 0, GIB));
    let container = node.contain(&[&shares[0], &shares[1]]);
    // It takes of both.
    let mut running = container.start(probe(), &["hold", "--take", "1536Mi"]);
    running.event("holding");
    let callers = host.callers();
    assert_eq!(callers.len(), 1, "it asks once");
    for share in &shares {
        assert_eq!(told(share), [Some(callers[0])]);
        let known = share.ledger(|ledger| {
            ledger
                .processes()
                .map(|process| (process.pid, process.pid_namespace))
                .collect::<Vec<_>>()
        });
        assert_eq!(known, [own_pid(callers[0])]);
        assert_ne!(known[0].0, callers[0], "a container counts anew");
    }
    running.kill();
}

#[test]
fn a_process_that_only_launches_learns_it_too() {
    if !can_contain("a_process_that_only_launches_learns_it_too") {
        return;
    }
    let node = Node::new();
    let host = Host::answering(&node.host(), tell);
    let share = node.share("claim-0", 0, GIB);
    node.contain(&[&share]).run_c("launches", false, &["1"]);
    assert_eq!(told(&share), host.callers().into_iter().map(Some).collect::<Vec<_>>());
    assert_eq!(host.callers().len(), 1);
}

#[test]
fn a_process_that_has_no_proc_is_known_by_what_the_host_calls_it() {
    if !can_contain("a_process_that_has_no_proc_is_known_by_what_the_host_calls_it") {
        return;
    }
    let node = Node::new();
    let host = Host::answering(&node.host(), tell);
    let share = node.share("claim-0", 0, GIB);
    let script = format!("mount -t tmpfs tmpfs /proc; exec {} hold --take 1Mi", probe().display());
    let mut running = node.contain(&[&share]).start("sh", &["-c", &script]);
    running.event("holding");
    let slots = share.ledger(|ledger| {
        ledger
            .processes()
            .map(|slot| (slot.start_ticks, slot.pid_namespace, slot.host_pid))
            .collect::<Vec<_>>()
    });
    assert_eq!(slots, [(0, 0, Some(host.callers()[0]))]);
    running.kill();
}

#[test]
fn processes_that_part_learn_each_its_own() {
    if !can_contain("processes_that_part_learn_each_its_own") {
        return;
    }
    let node = Node::new();
    let host = Host::answering(&node.host(), tell);
    let share = node.share("claim-0", 0, GIB);
    let mut running = node.contain(&[&share]).start(program("parting", false, node.path()), &[]);
    running.with("parted");
    let callers: BTreeSet<_> = host.callers().into_iter().collect();
    assert_eq!(callers.len(), 2, "parent and child");
    assert_eq!(told(&share).into_iter().flatten().collect::<BTreeSet<_>>(), callers);
    let owners = share.ledger(|ledger| {
        ledger.processes().map(|process| (process.host_pid, process.pid)).collect::<Vec<_>>()
    });
    for (host_pid, pid) in owners {
        assert_eq!(own_pid(host_pid.expect("told")).0, pid);
    }
    running.kill();
}

#[test]
fn where_nobody_is_there_or_nobody_listens_nothing_changes() {
    if !can_contain("where_nobody_is_there_or_nobody_listens_nothing_changes") {
        return;
    }
    let node = Node::new();
    let share = node.share("claim-0", 0, GIB);
    let container = node.contain(&[&share]);
    let fills = || assert_eq!(container.probe(&["fill"])[1]["takenBytes"], GIB);
    fills();
    // A driver that is gone leaves its socket.
    drop(UnixListener::bind(node.host().join(SOCKET)).expect("bound"));
    fills();
    fs::remove_file(node.host().join(SOCKET)).expect("removed");
    fs::write(node.host().join(SOCKET), answer(7)).expect("written");
    fills();
    assert!(told(&share).iter().all(Option::is_none));
}

#[test]
fn a_host_that_does_not_answer_is_waited_for_once_and_not_for_ever() {
    if !can_contain("a_host_that_does_not_answer_is_waited_for_once_and_not_for_ever") {
        return;
    }
    let node = Node::new();
    let host = Host::answering(&node.host(), |_, _| {});
    let share = node.share("claim-0", 0, GIB);
    // Thousands of calls by two threads.
    let race = program("race", false, node.path());
    let mut running = node.contain(&[&share]).start(&race, &["1", "10000"]);
    running.with("held");
    assert_eq!(host.callers().len(), 1);
    assert_eq!(told(&share), [None]);
    running.kill();
}

#[test]
fn answers_that_make_no_sense_say_nothing() {
    if !can_contain("answers_that_make_no_sense_say_nothing") {
        return;
    }
    let wrong_version = {
        let mut bytes = answer(7).to_vec();
        bytes[8] = 2;
        bytes
    };
    let answers = [
        Vec::new(),
        answer(7)[..15].to_vec(),
        vec![0xff; 16],
        vec![b'T'; 1 << 20],
        wrong_version,
        answer(0).to_vec(),
        answer(u32::MAX).to_vec(),
    ];
    let node = Node::new();
    for (case, bytes) in answers.into_iter().enumerate() {
        let host = Host::answering(&node.host(), move |connection, _| {
            // Who wants no more of it closes.
            let _ = connection.write_all(&bytes);
            let _ = connection.shutdown(Shutdown::Write);
        });
        let share = node.share(&format!("claim-{case}"), 0, 64 * MIB);
        assert_eq!(node.contain(&[&share]).probe(&["fill"])[1]["takenBytes"], 64 * MIB);
        assert_eq!((host.callers().len(), told(&share)), (1, vec![None]), "case {case}");
    }
}

#[test]
fn a_driver_that_starts_anew_is_found_by_containers_that_run() {
    if !can_contain("a_driver_that_starts_anew_is_found_by_containers_that_run") {
        return;
    }
    let node = Node::new();
    let first = Host::answering(&node.host(), tell);
    let share = node.share("claim-0", 0, GIB);
    let fifo = node.path().join("go");
    assert!(
        std::process::Command::new("mkfifo").arg(&fifo).status().expect("mkfifo runs").success()
    );
    let probe = probe().display().to_string();
    let script = format!("{probe} fill; read go <{}; exec {probe} hold --take 1Mi", fifo.display());
    let mut running = node.contain(&[&share]).start("sh", &["-c", &script]);
    running.event("filled");
    assert_eq!(first.callers().len(), 1);
    drop(first);
    let second = Host::answering(&node.host(), tell);
    fs::write(&fifo, "on\n").expect("read");
    running.event("holding");
    assert_eq!(second.callers().len(), 1);
    assert_eq!(told(&share), [Some(second.callers()[0])]);
    running.kill();
}

#[test]
fn a_tenant_cannot_take_the_sockets_place() {
    if !can_contain("a_tenant_cannot_take_the_sockets_place") {
        return;
    }
    let node = Node::new();
    let _host = Host::answering(&node.host(), tell);
    let share = node.share("claim-0", 0, MIB);
    let at = "/dev/tessera/host";
    let script = format!(
        "for change in 'rm -f {at}/{SOCKET}' 'touch {at}/x' 'mv {at}/{SOCKET} {at}/x' 'chmod 0 {at}/{SOCKET}'; \
         do $change 2>/dev/null && echo \"$change\"; done; test -S {at}/{SOCKET}"
    );
    let output = node.contain(&[&share]).run("sh", &["-c", &script]);
    assert_eq!(
        (output.status.success(), String::from_utf8_lossy(&output.stdout).as_ref()),
        (true, "")
    );
}
