//! Processes are told what the host calls them, whatever others do with the socket.

mod stand_in;

use std::{
    io::{ErrorKind, IoSlice, Read, Write},
    os::fd::{AsFd, OwnedFd},
    os::unix::{
        fs::{MetadataExt, PermissionsExt},
        net::UnixStream,
    },
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use stand_in::node::Node;
use tessera_driver::{driver::DriverSettings, host_pids, state::StatePaths};
use tessera_intercept_abi::host_pid::{LEN, SOCKET, parse};
use tessera_test_support::{report_skip, test_name};
use tokio_util::sync::CancellationToken;

/// A server below a directory of its own.
struct Server {
    paths: StatePaths,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Server {
    async fn at(paths: &StatePaths) -> Self {
        let stop = CancellationToken::new();
        let task = tokio::spawn(host_pids::serve(paths.clone(), stop.clone()));
        let server = Self { paths: paths.clone(), stop, task };
        server.told().await;
        server
    }

    /// What this process is told, as soon as somebody answers.
    async fn told(&self) -> Option<u32> {
        told(self.paths.host().join(SOCKET)).await
    }

    async fn stop(self) {
        self.stop.cancel();
        self.task.await.expect("no panic");
    }
}

fn ask(socket: &PathBuf) -> std::io::Result<[u8; LEN]> {
    let mut answer = [0; LEN];
    let mut connection = UnixStream::connect(socket)?;
    connection.read_exact(&mut answer)?;
    // There is no more.
    assert_eq!(connection.read(&mut [0])?, 0);
    Ok(answer)
}

/// Far longer than anything takes here.
const PATIENCE: Duration = Duration::from_secs(300);

async fn told(socket: PathBuf) -> Option<u32> {
    tokio::time::timeout(PATIENCE, told_at_last(socket)).await.expect("somebody answers")
}

async fn told_at_last(socket: PathBuf) -> Option<u32> {
    loop {
        let socket = socket.clone();
        match tokio::task::spawn_blocking(move || ask(&socket)).await.expect("no panic") {
            Ok(answer) => return parse(&answer),
            Err(error) => {
                assert!(
                    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused),
                    "{error}"
                );
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }
}

fn state() -> (tempfile::TempDir, StatePaths) {
    let directory = tempfile::tempdir().expect("a directory");
    let paths = StatePaths::new(directory.path());
    (directory, paths)
}

#[tokio::test]
async fn who_connects_is_told_what_this_namespace_calls_it() {
    let (_directory, paths) = state();
    let server = Server::at(&paths).await;
    assert_eq!(server.told().await, Some(std::process::id()));
    let socket = paths.host().join(SOCKET);
    let mode = |path| std::fs::metadata(path).expect("there").permissions().mode() & 0o777;
    assert_eq!(
        (mode(socket), mode(paths.host())),
        (0o666, 0o755),
        "any user of a container connects"
    );
    server.stop().await;
}

/// Where [`asked_from_a_namespace`] connects, if it is what the test below has started.
const ASKS_AT: &str = "TESSERA_TEST_ASKS_AT";

#[tokio::test]
async fn a_process_of_another_namespace_is_told_the_number_it_has_here() {
    let (_directory, paths) = state();
    let server = Server::at(&paths).await;
    let this = std::env::current_exe().expect("a test has a path");
    let mut unshare = Command::new("unshare");
    unshare.args(["--user", "--map-root-user", "--pid", "--fork"]).arg(this);
    unshare.args(["--exact", "asked_from_a_namespace", "--nocapture"]);
    unshare.env(ASKS_AT, paths.host().join(SOCKET));
    let output = tokio::task::spawn_blocking(move || unshare.output()).await.expect("no panic");
    let output = output.expect("unshare runs");
    if String::from_utf8_lossy(&output.stderr).starts_with("unshare:") {
        report_skip(
            test_name!(),
            format!("no namespaces here: {}", String::from_utf8_lossy(&output.stderr)),
        );
        return;
    }
    assert!(output.status.success(), "{output:?}");
    server.stop().await;
}

#[test]
fn asked_from_a_namespace() {
    let Some(socket) = std::env::var_os(ASKS_AT) else { return };
    let told = parse(&ask(&PathBuf::from(socket)).expect("answered"));
    // /proc is still that of the outside, and has both numbers.
    let status = std::fs::read_to_string("/proc/self/status").expect("readable");
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:")).expect("a line");
    let numbers: Vec<u32> =
        numbers.split_whitespace().map(|number| number.parse().expect("one")).collect();
    assert!(numbers.len() > 1 && numbers.ends_with(&[std::process::id()]), "{numbers:?}");
    assert_eq!(told, Some(numbers[0]));
}

#[tokio::test]
async fn callers_that_keep_silent_or_leave_or_come_in_crowds_keep_nobody_waiting() {
    let (_directory, paths) = state();
    let server = Server::at(&paths).await;
    let socket = paths.host().join(SOCKET);
    // Never read, never closed.
    let mut silent = Vec::new();
    let mut left = 0;
    while silent.len() + left < 700 {
        let at = socket.clone();
        let connected =
            tokio::task::spawn_blocking(move || UnixStream::connect(at)).await.expect("no panic");
        if (silent.len() + left).is_multiple_of(2) {
            silent.push(connected.expect("connected"));
        } else {
            drop(connected);
            left += 1;
        }
    }
    assert_eq!(server.told().await, Some(std::process::id()));
    // Nothing is kept of who was told: there is no more to come, for whoever still holds its end.
    for mut caller in silent {
        caller.set_read_timeout(Some(PATIENCE)).expect("set");
        let mut all = Vec::new();
        caller.read_to_end(&mut all).expect("closed");
        assert_eq!(all.len(), LEN);
    }
    server.stop().await;
}

#[tokio::test]
async fn a_crowd_is_answered_at_a_bounded_rate() {
    let (_directory, paths) = state();
    let server = Server::at(&paths).await;
    let begun = std::time::Instant::now();
    for _ in 0..1024 {
        server.told().await;
    }
    assert!(begun.elapsed() >= Duration::from_millis(300), "{:?}", begun.elapsed());
    server.stop().await;
}

fn inode(socket: &Path) -> u64 {
    std::fs::metadata(socket).expect("there").ino()
}

/// Waits until the name leads to another socket.
async fn taken_from(socket: &Path, before: u64) {
    let taken = async {
        while inode(socket) == before {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, taken).await.expect("the newest takes the name");
}

#[tokio::test]
async fn the_name_belongs_to_who_came_last_and_goes_to_who_is_left() {
    let (_directory, paths) = state();
    let socket = paths.host().join(SOCKET);
    let old = Server::at(&paths).await;
    let first = inode(&socket);
    let new = Server::at(&paths).await;
    taken_from(&socket, first).await;
    // A rolling update: the old one's end takes nothing away.
    old.stop().await;
    assert_eq!(new.told().await, Some(std::process::id()));
    // And one that is taken back: the new one dies, and the one that is left is found again.
    let second = inode(&socket);
    let newest = Server::at(&paths).await;
    taken_from(&socket, second).await;
    newest.stop().await;
    assert_eq!(new.told().await, Some(std::process::id()));
    new.stop().await;
}

#[tokio::test]
async fn what_a_dead_driver_left_is_in_nobodys_way() {
    let (_directory, paths) = state();
    host_pids::make_directory(&paths).expect("made");
    for name in [SOCKET, "pid.new"] {
        drop(std::os::unix::net::UnixListener::bind(paths.host().join(name)).expect("bound"));
    }
    let server = Server::at(&paths).await;
    assert_eq!(server.told().await, Some(std::process::id()));
    server.stop().await;
}

/// A TCP socket that takes an hour to close: there is data in it that nobody takes.
fn lingering() -> (OwnedFd, std::net::TcpStream, std::net::TcpListener) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bound");
    let sender =
        std::net::TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
    let (silent, _) = listener.accept().expect("accepted");
    sender.set_nonblocking(true).expect("set");
    while (&sender).write(&[0; 1 << 16]).is_ok() {}
    rustix::net::sockopt::set_socket_linger(&sender, Some(Duration::from_secs(3600))).expect("set");
    // To linger is to wait in `close`, unless that is not to wait either.
    sender.set_nonblocking(false).expect("set");
    (sender.into(), silent, listener)
}

/// Leaves a file to whoever closes the connection. A thread of its own does it, for which nobody
/// waits: where the driver was faster, that one is the last to close the file, by its own
/// descriptor or by that of the connection.
fn pass(socket: &Path, file: OwnedFd) {
    let (done, is_done) = std::sync::mpsc::channel();
    let socket = socket.to_owned();
    std::thread::spawn(move || {
        let Ok(connection) = UnixStream::connect(&socket) else { return };
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut passed = SendAncillaryBuffer::new(&mut space);
        let files = [file.as_fd()];
        assert!(passed.push(SendAncillaryMessage::ScmRights(&files)));
        let bytes = [IoSlice::new(b"x")];
        let _ = rustix::net::sendmsg(&connection, &bytes, &mut passed, SendFlags::NOSIGNAL);
        done.send(()).expect("somebody waits");
    });
    // Or it could not connect.
    let _ = is_done.recv();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_that_leaves_a_file_that_does_not_close_holds_up_nothing_but_answers() {
    let node = Node::with_gpus(1);
    let driver = node.start().await;
    let socket = node.paths().host().join(SOCKET);
    let (mut kept, mut held_up) = (Vec::new(), false);
    // What is passed while the driver pauses is closed with the connection. When that is cannot be
    // seen from here.
    for _ in 0..2000 {
        let (file, silent, listener) = lingering();
        kept.push((silent, listener));
        pass(&socket, file);
        let answered = UnixStream::connect(&socket).and_then(|mut connection| {
            connection.set_read_timeout(Some(Duration::from_secs(15)))?;
            connection.read_exact(&mut [0; LEN])
        });
        if answered.is_err() {
            held_up = true;
            break;
        }
    }
    assert!(held_up, "the driver never had to close it");
    let kubelet = stand_in::kubelet::Kubelet::register(&node.path("kubelet")).await;
    let prepared =
        tokio::time::timeout(PATIENCE, kubelet.prepare(node.allocate("a", &[(0, 1, 0)]))).await;
    prepared.expect("the driver works on").expect("prepared");
    tokio::time::timeout(PATIENCE, driver.stop()).await.expect("it ends");
}

#[tokio::test]
async fn a_driver_answers_and_starts_where_it_cannot() {
    let node = Node::with_gpus(1);
    let driver = node.start().await;
    assert_eq!(told(node.paths().host().join(SOCKET)).await, Some(std::process::id()));
    driver.stop().await;
    // Too long for a socket's address.
    let far = node.path(&"state".repeat(30));
    let settings = DriverSettings { state_dir: far, ..node.settings() };
    let driver = node
        .start_with(settings, std::sync::Arc::new(node.mounts.clone()))
        .await
        .expect("it starts");
    driver.stop().await;
}
