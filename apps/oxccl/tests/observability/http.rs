//! Programs that the tests start, and requests to them: one to a connection, JSON or text.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Child;
use std::time::{Duration, Instant};

use serde_json::Value;

/// Generous: only a hang reaches it.
pub(crate) const TIME_LIMIT: Duration = Duration::from_secs(60);

pub(crate) fn soon() -> Instant {
    Instant::now() + TIME_LIMIT
}

/// Asks `done` again until it gives something.
pub(crate) fn wait_until<T>(what: &str, mut done: impl FnMut() -> Option<T>) -> T {
    let deadline = soon();
    loop {
        if let Some(found) = done() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what}: not within {TIME_LIMIT:?}");
        std::thread::sleep(Duration::from_millis(30));
    }
}

/// The status and the body; an error if no server is there.
pub(crate) fn request(method: &str, url: &str, body: Option<&Value>) -> std::io::Result<(u16, String)> {
    let rest = url.strip_prefix("http://").expect("a URL of http");
    let (address, path) = rest.split_once('/').unwrap_or((rest, ""));
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(TIME_LIMIT))?;
    let body = body.map(Value::to_string).unwrap_or_default();
    write!(
        stream,
        "{method} /{path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut answer = Vec::new();
    let mut part = [0; 64 * 1024];
    let (head, length) = loop {
        let text = String::from_utf8_lossy(&answer);
        if let Some((head, _)) = text.split_once("\r\n\r\n") {
            let field = |line: &str| {
                let (name, value) = line.split_once(':')?;
                let is = name.eq_ignore_ascii_case("content-length");
                is.then(|| value.trim().parse::<usize>().ok()).flatten()
            };
            break (head.to_string(), head.lines().find_map(field));
        }
        match stream.read(&mut part)? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            n => answer.extend_from_slice(&part[..n]),
        }
    };
    let begin = head.len() + 4;
    let whole = |n: usize| length.is_some_and(|length| n >= begin + length);
    while !whole(answer.len()) {
        match stream.read(&mut part)? {
            0 => break,
            n => answer.extend_from_slice(&part[..n]),
        }
    }
    let status = head.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or(0);
    Ok((status, String::from_utf8_lossy(&answer[begin..]).into_owned()))
}

/// A page that is there.
pub(crate) fn get(url: &str) -> String {
    let (status, body) = request("GET", url, None).unwrap();
    assert_eq!(status, 200, "{url}: {body}");
    body
}

/// Ended and collected when it is dropped.
pub(crate) struct Process(pub(crate) Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
