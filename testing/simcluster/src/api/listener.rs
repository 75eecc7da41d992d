//! TCP listener that can be stopped and rebound to the same port, to simulate API server restarts.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// Wanted state: `None` is stopped. Cancelling the token breaks all connections.
pub(crate) type ListenerState = Option<CancellationToken>;

/// A listener that accepts connections while it is started.
pub(crate) struct RestartableListener {
    address: SocketAddr,
    listener: Option<TcpListener>,
    state: watch::Receiver<ListenerState>,
}

impl RestartableListener {
    /// Returns a started listener and the sender of its state.
    pub(crate) fn new(
        listener: TcpListener,
        address: SocketAddr,
    ) -> (Self, watch::Sender<ListenerState>) {
        let (state_sender, state) = watch::channel(Some(CancellationToken::new()));
        (Self { address, listener: Some(listener), state }, state_sender)
    }

    /// Accepts the next connection, after binding the port again if needed.
    async fn connection(&mut self) -> io::Result<Connection> {
        loop {
            let Some(open) = self.state.borrow_and_update().clone() else {
                self.listener = None;
                if self.state.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
                continue;
            };
            let listener = match self.listener.take() {
                Some(listener) => listener,
                None => TcpListener::bind(self.address).await?,
            };
            let listener = &*self.listener.insert(listener);
            tokio::select! {
                accepted = listener.accept() => {
                    let (stream, _) = accepted?;
                    // As Go sets it: otherwise each event of a watch waits for 40 ms.
                    stream.set_nodelay(true)?;
                    let broken = Box::pin(open.cancelled_owned());
                    return Ok(Connection { stream, broken });
                }
                Ok(()) = self.state.changed() => {}
            }
        }
    }
}

impl Listener for RestartableListener {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        loop {
            match self.connection().await {
                Ok(connection) => return (connection, self.address),
                Err(error) => {
                    tracing::warn!(%error, address = %self.address, "cannot accept connection; retrying");
                    tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }
}

/// A connection that breaks, even in mid-transfer, when the listener stops.
pub(crate) struct Connection {
    stream: TcpStream,
    broken: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl Connection {
    fn broken(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        match self.broken.as_mut().poll(context) {
            Poll::Ready(()) => Err(io::ErrorKind::ConnectionReset.into()),
            Poll::Pending => Ok(()),
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.broken(context)?;
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.broken(context)?;
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.broken(context)?;
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
