//! The PID server, also with hostile clients.

mod fakes;

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

use fakes::node::Node;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use tessera_driver::{driver::DriverSettings, host_pids, state::StatePaths};
use tessera_intercept_abi::host_pid::{LEN, SOCKET, parse};
use tessera_test_support::{report_skip, test_name};
use tokio_util::sync::CancellationToken;

/// A running server.
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
        server.host_pid().await;
        server
    }

    /// Returns the PID that the server sends to this process.
    async fn host_pid(&self) -> Option<u32> {
        host_pid(self.paths.host().join(SOCKET)).await
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
    // The answer ends here.
    assert_eq!(connection.read(&mut [0])?, 0);
    Ok(answer)
}

/// Deadline of all waits.
const DEADLINE: Duration = Duration::from_secs(300);

async fn host_pid(socket: PathBuf) -> Option<u32> {
    tokio::time::timeout(DEADLINE, retry_host_pid(socket)).await.expect("an answer")
}

async fn retry_host_pid(socket: PathBuf) -> Option<u32> {
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
async fn client_gets_pid_in_namespace_of_server() {
    let (_directory, paths) = state();
    let server = Server::at(&paths).await;
    assert_eq!(server.host_pid().await, Some(std::process::id()));
    let socket = paths.host().join(SOCKET);
    let mode = |path| std::fs::metadata(path).expect("there").permissions().mode() & 0o777;
    assert_eq!(
        (mode(socket), mode(paths.host())),
        (0o666, 0o755),
        "any user of a container connects"
    );
    server.stop().await;
}

/// The socket to which [`connects_from_another_namespace`] connects, if the test below started it.
const SOCKET_VARIABLE: &str = "TESSERA_TEST_SOCKET_VARIABLE";

#[tokio::test]
async fn client_of_other_namespace_gets_pid_of_this_one() {
    let (_directory, paths) = state();
    let server = Server::at(&paths).await;
    let this = std::env::current_exe().expect("a test has a path");
    let mut unshare = Command::new("unshare");
    unshare.args(["--user", "--map-root-user", "--pid", "--fork"]).arg(this);
    unshare.args(["--exact", "connects_from_another_namespace", "--nocapture"]);
    unshare.env(SOCKET_VARIABLE, paths.host().join(SOCKET));
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
fn connects_from_another_namespace() {
    let Some(socket) = std::env::var_os(SOCKET_VARIABLE) else { return };
    let host_pid = parse(&ask(&PathBuf::from(socket)).expect("answered"));
    // /proc is that of the outer namespace and has both PIDs.
    let status = std::fs::read_to_string("/proc/self/status").expect("readable");
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:")).expect("a line");
    let numbers: Vec<u32> =
        numbers.split_whitespace().map(|number| number.parse().expect("one")).collect();
    assert!(numbers.len() > 1 && numbers.ends_with(&[std::process::id()]), "{numbers:?}");
    assert_eq!(host_pid, Some(numbers[0]));
}

#[tokio::test]
async fn silent_and_leaving_clients_delay_no_other() {
    let (_directory, paths) = state();
    let server = Server::at(&paths).await;
    let socket = paths.host().join(SOCKET);
    // Never reads, never closes.
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
    assert_eq!(server.host_pid().await, Some(std::process::id()));
    // The server keeps no connection: those that clients still hold are at their end.
    for mut caller in silent {
        caller.set_read_timeout(Some(DEADLINE)).expect("set");
        let mut all = Vec::new();
        caller.read_to_end(&mut all).expect("closed");
        assert_eq!(all.len(), LEN);
    }
    server.stop().await;
}

#[tokio::test]
async fn many_clients_are_served_at_a_bounded_rate() {
    let (_directory, paths) = state();
    let server = Server::at(&paths).await;
    let begun = std::time::Instant::now();
    for _ in 0..1024 {
        server.host_pid().await;
    }
    assert!(begun.elapsed() >= Duration::from_millis(300), "{:?}", begun.elapsed());
    server.stop().await;
}

fn inode(socket: &Path) -> u64 {
    std::fs::metadata(socket).expect("there").ino()
}

/// Waits until another socket has the name.
async fn taken_from(socket: &Path, before: u64) {
    let taken = async {
        while inode(socket) == before {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(DEADLINE, taken).await.expect("the newest instance takes the name");
}

#[tokio::test]
async fn newest_instance_has_the_name_until_it_ends() {
    let (_directory, paths) = state();
    let socket = paths.host().join(SOCKET);
    let old = Server::at(&paths).await;
    let first = inode(&socket);
    let new = Server::at(&paths).await;
    taken_from(&socket, first).await;
    // A rolling update: the end of the old instance changes nothing.
    old.stop().await;
    assert_eq!(new.host_pid().await, Some(std::process::id()));
    // A rollback: the new instance dies, and the old one takes the name again.
    let second = inode(&socket);
    let newest = Server::at(&paths).await;
    taken_from(&socket, second).await;
    newest.stop().await;
    assert_eq!(new.host_pid().await, Some(std::process::id()));
    new.stop().await;
}

#[tokio::test]
async fn files_of_dead_driver_do_not_block_start() {
    let (_directory, paths) = state();
    host_pids::make_directory(&paths).expect("made");
    for name in [SOCKET, "pid.new"] {
        drop(std::os::unix::net::UnixListener::bind(paths.host().join(name)).expect("bound"));
    }
    let server = Server::at(&paths).await;
    assert_eq!(server.host_pid().await, Some(std::process::id()));
    server.stop().await;
}

/// Returns a TCP socket that takes an hour to close: its data is never read.
fn lingering() -> (OwnedFd, std::net::TcpStream, std::net::TcpListener) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bound");
    let sender =
        std::net::TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
    let (silent, _) = listener.accept().expect("accepted");
    sender.set_nonblocking(true).expect("set");
    while (&sender).write(&[0; 1 << 16]).is_ok() {}
    rustix::net::sockopt::set_socket_linger(&sender, Some(Duration::from_secs(3600))).expect("set");
    // close(2) blocks for the linger time, unless the socket is non-blocking.
    sender.set_nonblocking(false).expect("set");
    (sender.into(), silent, listener)
}

/// Passes a file into a connection. A thread of its own does it, which is never joined: if the
/// driver was faster, this thread is the last to close the file and blocks, sometimes within
/// `sendmsg`, by which the kernel closes files that were passed and not received.
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
        let _ = done.send(());
    });
    // The thread may have failed to connect, or block: then another file is passed.
    let _ = is_done.recv_timeout(Duration::from_secs(5));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lingering_file_of_client_blocks_replies_only() {
    let node = Node::with_gpus(1);
    let driver = node.start().await;
    let socket = node.paths().host().join(SOCKET);
    let (mut kept, mut held_up) = (Vec::new(), false);
    // A file that is passed while the driver pauses is closed with the connection, at an unknown
    // time.
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
    assert!(held_up, "the driver never closed it");
    let kubelet = fakes::kubelet::Kubelet::register(&node.path("kubelet")).await;
    let prepared =
        tokio::time::timeout(DEADLINE, kubelet.prepare(node.allocate("a", &[(0, 1, 0)]))).await;
    prepared.expect("the driver works").expect("prepared");
    tokio::time::timeout(DEADLINE, driver.stop()).await.expect("it ends");
}

#[tokio::test]
async fn driver_starts_without_pid_socket() {
    let node = Node::with_gpus(1);
    let driver = node.start().await;
    assert_eq!(host_pid(node.paths().host().join(SOCKET)).await, Some(std::process::id()));
    driver.stop().await;
    // Too long for the address of a socket.
    let far = node.path(&"state".repeat(30));
    let settings = DriverSettings { state_dir: far, ..node.settings() };
    let driver = node.start_as(settings).await;
    driver.stop().await;
}
