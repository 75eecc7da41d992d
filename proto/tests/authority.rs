//! Handling of the `:authority` of requests over a Unix socket. The tests send raw HTTP/2, because
//! no Rust client sends an invalid authority.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    time::Duration,
};

use tessera_proto::registration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
    registration_server::{Registration, RegistrationServer},
};
use tonic::{Request, Response, Status, transport::Server};

struct Plugin;

#[tonic::async_trait]
impl Registration for Plugin {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo { name: "gpu.example".into(), ..Default::default() }))
    }

    async fn notify_registration_status(
        &self,
        _: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        Ok(Response::new(Default::default()))
    }
}

const DATA: u8 = 0x0;
const HEADERS: u8 = 0x1;
const RST_STREAM: u8 = 0x3;
const SETTINGS: u8 = 0x4;
const END_STREAM: u8 = 0x1;
const END_HEADERS: u8 = 0x4;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("a short payload").to_be_bytes();
    let mut bytes = vec![length[1], length[2], length[3], kind, flags];
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// Appends an HPACK "literal header field without indexing, new name" with uncompressed strings.
fn header(block: &mut Vec<u8>, name: &str, value: &str) {
    block.push(0);
    for text in [name, value] {
        block.push(
            u8::try_from(text.len()).ok().filter(|length| *length < 127).expect("a short text"),
        );
        block.extend(text.as_bytes());
    }
}

/// Sends one GetInfo with this authority. Returns the kinds of the frames on its stream, up to the
/// first body or reset.
fn response_frames(socket: &Path, authority: Option<&str>) -> Vec<u8> {
    let mut block = Vec::new();
    header(&mut block, ":method", "POST");
    header(&mut block, ":scheme", "http");
    header(&mut block, ":path", "/pluginregistration.Registration/GetInfo");
    if let Some(authority) = authority {
        header(&mut block, ":authority", authority);
    }
    header(&mut block, "content-type", "application/grpc");
    header(&mut block, "te", "trailers");

    let mut connection = UnixStream::connect(socket).expect("a connection");
    connection.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    let mut request = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    request.extend(frame(SETTINGS, 0, 0, &[]));
    request.extend(frame(HEADERS, END_HEADERS, 1, &block));
    // gRPC framing: not compressed, empty message.
    request.extend(frame(DATA, END_STREAM, 1, &[0; 5]));
    connection.write_all(&request).expect("a request");

    let mut kinds = Vec::new();
    loop {
        let mut head = [0; 9];
        connection.read_exact(&mut head).expect("a frame");
        let length = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
        connection.read_exact(&mut vec![0; length]).expect("its payload");
        let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
        if stream == 1 {
            kinds.push(head[3]);
            if matches!(head[3], DATA | RST_STREAM) {
                return kinds;
            }
        }
    }
}

/// Serves in a background thread; the socket exists when this returns.
fn serve(directory: &Path) -> PathBuf {
    let socket = directory.join("reg.sock");
    let listener = std::os::unix::net::UnixListener::bind(&socket).expect("a socket");
    listener.set_nonblocking(true).expect("a non-blocking socket");
    std::thread::spawn(move || {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async move {
            let listener = tokio::net::UnixListener::from_std(listener).expect("the socket");
            let incoming = tokio_stream::wrappers::UnixListenerStream::new(listener);
            let server = Server::builder().add_service(RegistrationServer::new(Plugin));
            server.serve_with_incoming(incoming).await
        })
    });
    socket
}

#[test]
fn kubelet_authorities_are_served() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let socket = serve(directory.path());
    // Authorities of the DRA socket and of a registration socket with an `@` in its name.
    for authority in
        ["localhost", "%2Fvar%2Flib%2Fkubelet%2Fplugins_registry%2Fgpu.example@reg.sock"]
    {
        assert_eq!(
            response_frames(&socket, Some(authority)),
            [HEADERS, DATA],
            "authority {authority:?}"
        );
    }
}

#[test]
fn socket_path_as_authority_resets_the_stream() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let socket = serve(directory.path());
    // If one of these begins to pass, clients without `-authority localhost` are supported.
    for authority in
        ["%2Fvar%2Flib%2Fkubelet%2Fplugins%2Fdra.sock", "/var/lib/kubelet/plugins/dra.sock", ""]
    {
        assert_eq!(
            response_frames(&socket, Some(authority)),
            [RST_STREAM],
            "authority {authority:?}"
        );
    }
}
