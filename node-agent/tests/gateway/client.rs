//! A small HTTP/1.1 client that shows what is on the wire: status, headers, and events as they arrive.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpSocket, TcpStream};

pub struct Request {
    method: &'static str,
    path: String,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

pub struct Reply {
    pub status: u16,
    headers: Vec<(String, String)>,
    connection: BufReader<TcpStream>,
}

pub fn get(path: impl Into<String>) -> Request {
    request("GET", path)
}

/// With the body's content type.
pub fn post(path: &str, body: &Value) -> Request {
    post_bytes(path, body.to_string()).header("content-type", "application/json")
}

pub fn post_bytes(path: &str, body: impl Into<Vec<u8>>) -> Request {
    Request {
        body: body.into(),
        ..request("POST", path)
    }
}

pub fn request(method: &'static str, path: impl Into<String>) -> Request {
    Request {
        method,
        path: path.into(),
        headers: Vec::new(),
        body: Vec::new(),
    }
}

impl Request {
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// Waits for the answer's head.
    pub async fn send(self, server: SocketAddr) -> Reply {
        self.send_from(IpAddr::V4(Ipv4Addr::LOCALHOST), server)
            .await
    }

    /// From this address of this machine.
    pub async fn send_from(self, own: IpAddr, server: SocketAddr) -> Reply {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::new(own, 0)).unwrap();
        let mut stream = socket.connect(server).await.unwrap();
        let mut head = format!(
            "{} {} HTTP/1.1\r\nconnection: close\r\n",
            self.method, self.path
        );
        if !self.headers.iter().any(|(name, _)| name == "host") {
            head += &format!("host: {server}\r\n");
        }
        for (name, value) in &self.headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += &format!("content-length: {}\r\n\r\n", self.body.len());
        stream.write_all(head.as_bytes()).await.unwrap();
        // A server may refuse a body that it has not read.
        let _ = stream.write_all(&self.body).await;

        let mut connection = BufReader::new(stream);
        let status_line = line(&mut connection).await;
        let status = status_line.split(' ').nth(1).unwrap().parse().unwrap();
        let mut headers = Vec::new();
        loop {
            let header = line(&mut connection).await;
            let Some((name, value)) = header.split_once(": ") else {
                break;
            };
            headers.push((name.to_ascii_lowercase(), value.to_string()));
        }
        Reply {
            status,
            headers,
            connection,
        }
    }
}

impl Reply {
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    pub async fn text(mut self) -> String {
        let mut body = Vec::new();
        if let Some(length) = self.header("content-length") {
            body.resize(length.parse().unwrap(), 0);
            self.connection.read_exact(&mut body).await.unwrap();
        } else {
            while let Some(chunk) = self.chunk().await {
                body.extend(chunk);
            }
        }
        String::from_utf8(body).unwrap()
    }

    pub async fn json(self) -> Value {
        let text = self.text().await;
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// The data of the next server-sent event; `None` at the end of the stream.
    pub async fn event(&mut self) -> Option<String> {
        loop {
            // The server writes every event as one chunk.
            let chunk = String::from_utf8(self.chunk().await?).unwrap();
            let chunk = chunk.strip_suffix("\n\n").expect("a whole event");
            if let Some(data) = chunk.strip_prefix("data: ") {
                return Some(data.to_string());
            }
            assert!(chunk.starts_with(':'), "neither data nor comment: {chunk}");
        }
    }

    pub async fn json_event(&mut self) -> Value {
        serde_json::from_str(&self.event().await.expect("an event")).unwrap()
    }

    async fn chunk(&mut self) -> Option<Vec<u8>> {
        let size = usize::from_str_radix(&line(&mut self.connection).await, 16).unwrap();
        let mut chunk = vec![0; size + 2];
        self.connection.read_exact(&mut chunk).await.unwrap();
        assert_eq!(chunk.split_off(size), b"\r\n");
        (size > 0).then_some(chunk)
    }
}

async fn line(connection: &mut BufReader<TcpStream>) -> String {
    let mut line = String::new();
    connection.read_line(&mut line).await.unwrap();
    line.trim_end().to_string()
}
