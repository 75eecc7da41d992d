//! Processes get their host PID from the driver's socket, and are unaffected without it.

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

use container::{GIB, MIB, Node, NodeShare, probe, program, set_up};
use tessera_intercept_abi::host_pid::{SOCKET, answer};
use tessera_test_support::test_name;

/// Fake of the driver's server: responds to every connection and records the peers.
struct Host {
    directory: PathBuf,
    callers: Arc<Mutex<Vec<u32>>>,
    serves: Option<JoinHandle<()>>,
}

impl Host {
    /// Starts the server and replaces the socket of an earlier one.
    fn answering(directory: &Path, answer: impl Fn(&mut UnixStream, u32) + Send + 'static) -> Self {
        let new = directory.join("new");
        let listener = UnixListener::bind(&new).expect("bound");
        fs::rename(&new, directory.join(SOCKET)).expect("renamed");
        let callers = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&callers);
        let serves = thread::spawn(move || {
            raise_priority();
            let mut connections = Vec::new();
            for connection in listener.incoming() {
                let mut connection = connection.expect("a connection");
                let pid = peer(&connection);
                if pid == std::process::id() {
                    return;
                }
                seen.lock().expect("no panic").push(pid);
                answer(&mut connection, pid);
                // A closed connection would mean the end of the response.
                connections.push(connection);
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
        // A connection from the test ends the server.
        let _ = UnixStream::connect(self.directory.join(SOCKET));
        let ended = self.serves.take().expect("serves").join();
        assert!(ended.is_ok() || thread::panicking(), "the host serves");
    }
}

/// Gives this thread real-time priority, if permitted: a request times out after 200 ms, and the
/// machine may be busy.
fn raise_priority() {
    let first = libc::sched_param { sched_priority: 1 };
    // SAFETY: 0 is the calling thread, and the parameter lives.
    unsafe {
        libc::sched_setscheduler(0, libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, &raw const first)
    };
}

/// Returns the PID of the peer.
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
    assert_eq!(code, 0, "the system call succeeds");
    u32::try_from(peer.pid).expect("a process")
}

fn send_pid(connection: &mut UnixStream, pid: u32) {
    // A process whose request timed out has closed the connection.
    let _ = connection.write_all(&answer(pid));
}

/// Returns the host PID of each slot.
fn host_pids(share: &NodeShare) -> Vec<Option<u32>> {
    share.ledger(|ledger| ledger.processes().map(|process| process.host_pid).collect())
}

/// Returns the PID in the process's own namespace, and the inode of that namespace.
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
fn slot_has_host_pid_of_its_process() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let host = Host::answering(&node.host(), send_pid);
    let shares = ["claim-0", "claim-1"].map(|id| node.share(id, 0, GIB));
    let container = node.container(&[&shares[0], &shares[1]]);
    // It is charged to both shares.
    let mut running = container.hold("1536Mi");
    let callers = host.callers();
    assert_eq!(callers.len(), 1, "it asks once");
    for share in &shares {
        assert_eq!(host_pids(share), [Some(callers[0])]);
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
fn process_that_only_launches_has_host_pid() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let host = Host::answering(&node.host(), send_pid);
    let share = node.share("claim-0", 0, GIB);
    node.container(&[&share]).run_c("launches", false, &["1"]);
    assert_eq!(host_pids(&share), host.callers().into_iter().map(Some).collect::<Vec<_>>());
    assert_eq!(host.callers().len(), 1);
}

#[test]
fn process_without_proc_is_identified_by_host_pid() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let host = Host::answering(&node.host(), send_pid);
    let share = node.share("claim-0", 0, GIB);
    let script = format!("mount -t tmpfs tmpfs /proc; exec {} hold --take 1Mi", probe().display());
    let mut running = node.container(&[&share]).start("sh", &["-c", &script]);
    running.wait_for_event("holding");
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
fn forked_child_has_its_own_host_pid() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let host = Host::answering(&node.host(), send_pid);
    let share = node.share("claim-0", 0, GIB);
    let mut running = node.container(&[&share]).start(program("parting", false, node.path()), &[]);
    running.wait_for_field("parted");
    let callers: BTreeSet<_> = host.callers().into_iter().collect();
    assert_eq!(callers.len(), 2, "parent and child");
    assert_eq!(host_pids(&share).into_iter().flatten().collect::<BTreeSet<_>>(), callers);
    let owners = share.ledger(|ledger| {
        ledger.processes().map(|process| (process.host_pid, process.pid)).collect::<Vec<_>>()
    });
    for (host_pid, pid) in owners {
        assert_eq!(own_pid(host_pid.expect("a host PID")).0, pid);
    }
    running.kill();
}

#[test]
fn absent_or_closed_socket_changes_nothing() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let share = node.share("claim-0", 0, GIB);
    let container = node.container(&[&share]);
    let fills = || assert_eq!(container.probe(&["fill"])[1]["takenBytes"], GIB);
    fills();
    // A driver that has exited leaves its socket.
    drop(UnixListener::bind(node.host().join(SOCKET)).expect("bound"));
    fills();
    fs::remove_file(node.host().join(SOCKET)).expect("removed");
    fs::write(node.host().join(SOCKET), answer(7)).expect("written");
    fills();
    assert!(host_pids(&share).iter().all(Option::is_none));
}

#[test]
fn unanswered_request_times_out_and_is_not_repeated() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let host = Host::answering(&node.host(), |_, _| {});
    let share = node.share("claim-0", 0, GIB);
    // Thousands of calls by two threads.
    let race = program("race", false, node.path());
    let mut running = node.container(&[&share]).start(&race, &["1", "10000"]);
    running.wait_for_field("held");
    assert_eq!(host.callers().len(), 1);
    assert_eq!(host_pids(&share), [None]);
    running.kill();
}

#[test]
fn malformed_answers_are_ignored() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
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
    for (case, bytes) in answers.into_iter().enumerate() {
        let host = Host::answering(&node.host(), move |connection, _| {
            // The process closes the connection if the response is too long.
            let _ = connection.write_all(&bytes);
            let _ = connection.shutdown(Shutdown::Write);
        });
        let share = node.share(&format!("claim-{case}"), 0, 64 * MIB);
        assert_eq!(node.container(&[&share]).probe(&["fill"])[1]["takenBytes"], 64 * MIB);
        assert_eq!((host.callers().len(), host_pids(&share)), (1, vec![None]), "case {case}");
    }
}

#[test]
fn restarted_driver_is_found_by_running_containers() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let first = Host::answering(&node.host(), send_pid);
    let share = node.share("claim-0", 0, GIB);
    let fifo = node.path().join("go");
    assert!(
        std::process::Command::new("mkfifo").arg(&fifo).status().expect("mkfifo runs").success()
    );
    let probe = probe().display().to_string();
    let script = format!("{probe} fill; read go <{}; exec {probe} hold --take 1Mi", fifo.display());
    let mut running = node.container(&[&share]).start("sh", &["-c", &script]);
    running.wait_for_event("filled");
    assert_eq!(first.callers().len(), 1);
    drop(first);
    let second = Host::answering(&node.host(), send_pid);
    fs::write(&fifo, "on\n").expect("read");
    running.wait_for_event("holding");
    assert_eq!(second.callers().len(), 1);
    assert_eq!(host_pids(&share), [Some(second.callers()[0])]);
    running.kill();
}

#[test]
fn tenant_cannot_replace_the_socket() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let _host = Host::answering(&node.host(), send_pid);
    let share = node.share("claim-0", 0, MIB);
    let at = "/dev/tessera/host";
    let script = format!(
        "for change in 'rm -f {at}/{SOCKET}' 'touch {at}/x' 'mv {at}/{SOCKET} {at}/x' 'chmod 0 {at}/{SOCKET}'; \
         do $change 2>/dev/null && echo \"$change\"; done; test -S {at}/{SOCKET}"
    );
    let output = node.container(&[&share]).run("sh", &["-c", &script]);
    assert_eq!(
        (output.status.success(), String::from_utf8_lossy(&output.stdout).as_ref()),
        (true, "")
    );
}
