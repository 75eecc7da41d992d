//! The way in: a listener that can be closed and opened again on the same port, as when the server
//! restarts.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// What the door is told. The token of an open door ends its connections.
pub(crate) type Position = Option<CancellationToken>;

/// Lets connections in while it is open.
pub(crate) struct Door {
    address: SocketAddr,
    listener: Option<TcpListener>,
    position: watch::Receiver<Position>,
}

impl Door {
    /// An open door, and what moves it.
    pub(crate) fn new(
        listener: TcpListener,
        address: SocketAddr,
    ) -> (Self, watch::Sender<Position>) {
        let (mover, position) = watch::channel(Some(CancellationToken::new()));
        (Self { address, listener: Some(listener), position }, mover)
    }

    /// The next connection. An error means that it could not be had just now.
    async fn connection(&mut self) -> io::Result<Connection> {
        loop {
            let Some(open) = self.position.borrow_and_update().clone() else {
                self.listener = None;
                if self.position.changed().await.is_err() {
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
                    let cut = Box::pin(open.cancelled_owned());
                    return Ok(Connection { stream: accepted?.0, cut });
                }
                Ok(()) = self.position.changed() => {}
            }
        }
    }
}

impl Listener for Door {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        loop {
            match self.connection().await {
                Ok(connection) => return (connection, self.address),
                Err(error) => {
                    tracing::warn!(%error, address = %self.address, "cannot accept a connection, trying again");
                    tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }
}

/// A connection that breaks when the door closes, in the middle of whatever is under way.
pub(crate) struct Connection {
    stream: TcpStream,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl Connection {
    fn broken(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        match self.cut.as_mut().poll(context) {
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
