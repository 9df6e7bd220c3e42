// SPDX-License-Identifier: Apache-2.0
//! As much of HTTP/1.1 as one request and one response on a connection of their own need (RFC 9112). Used by the server and
//! the client; sees bytes, never a socket.

use httparse::{EMPTY_HEADER, Header, Status};

/// Bytes of a request's or response's head.
const MAX_HEAD: usize = 8 << 10;
/// Bytes of a request's body; the longest command is far shorter.
const MAX_BODY: usize = 16 << 10;
/// Headers of one message.
const MAX_HEADERS: usize = 64;
/// Bytes of a message.
pub const MAX_MESSAGE: usize = MAX_HEAD + MAX_BODY;

/// A whole request.
#[derive(Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// `GET`, `PUT`.
    pub method: String,
    /// From the first slash on.
    pub path: String,
    /// What came after the head.
    pub body: &'a [u8],
}

/// A response to send, or one that was received.
#[derive(Debug, PartialEq, Eq)]
pub struct Response {
    /// Status code.
    pub code: u16,
    /// JSON, or nothing.
    pub body: Vec<u8>,
}

impl Response {
    /// A response with this body.
    pub const fn new(code: u16, body: Vec<u8>) -> Self {
        Self { code, body }
    }

    /// The bytes to send.
    pub fn bytes(&self) -> Vec<u8> {
        let reason = match self.code {
            200 => "OK",
            204 => "No Content",
            400 => "Bad Request",
            404 => "Not Found",
            405 => "Method Not Allowed",
            408 => "Request Timeout",
            413 => "Content Too Large",
            431 => "Request Header Fields Too Large",
            _ => "Error",
        };
        let mut out = format!("HTTP/1.1 {} {reason}\r\nServer: tare\r\nConnection: close\r\n", self.code);
        // A 204 has no body, and says nothing of its length (RFC 9110, 8.6).
        if self.code != 204 {
            out.push_str(&format!("Content-Type: application/json\r\nContent-Length: {}\r\n", self.body.len()));
        }
        out.push_str("\r\n");
        let mut out = out.into_bytes();
        out.extend_from_slice(&self.body);
        out
    }
}

/// Why bytes are no request: the status code, and the line for the client.
#[derive(Debug, PartialEq, Eq)]
pub struct Bad(pub u16, pub String);

/// The request at the start of `bytes`; `None` if more bytes are needed.
///
/// # Errors
/// [`Bad`] for what can't become a request, or not a small one.
pub fn parse_request(bytes: &[u8]) -> Result<Option<Request<'_>>, Bad> {
    let mut headers = [EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    let head = match request.parse(bytes) {
        Ok(Status::Complete(head)) if head <= MAX_HEAD => head,
        Ok(Status::Partial) if bytes.len() < MAX_HEAD => return Ok(None),
        Ok(_) | Err(httparse::Error::TooManyHeaders) => {
            let what = format!("the head has more than {MAX_HEAD} bytes or {MAX_HEADERS} headers; send less");
            return Err(Bad(431, what));
        }
        Err(e) => return Err(Bad(400, format!("this is no HTTP request: {e}; speak HTTP/1.1"))),
    };
    let (method, path) = (request.method.unwrap_or_default().to_owned(), request.path.unwrap_or_default().to_owned());
    let len = body_length(request.headers)?.unwrap_or(0);
    if len > MAX_BODY {
        return Err(Bad(413, format!("the body has {len} bytes, and {MAX_BODY} may come; send less")));
    }
    let body = bytes.get(head..).unwrap_or_default();
    Ok(body.get(..len).map(|body| Request { method, path, body }))
}

/// What the headers say of the body's length.
fn body_length(headers: &[Header<'_>]) -> Result<Option<usize>, Bad> {
    let mut found = None;
    for header in headers {
        if header.name.eq_ignore_ascii_case("transfer-encoding") {
            return Err(Bad(400, "bodies come whole; send a Content-Length and no Transfer-Encoding".to_owned()));
        }
        if !header.name.eq_ignore_ascii_case("content-length") {
            continue;
        }
        let text = std::str::from_utf8(header.value).unwrap_or_default();
        let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        // A number that is too long for us is too long for a body.
        let len = digits.then(|| text.parse().unwrap_or(usize::MAX));
        match (len, found) {
            (Some(len), None) => found = Some(len),
            (Some(len), Some(before)) if len == before => {}
            _ => return Err(Bad(400, "its Content-Length is no number; send one number".to_owned())),
        }
    }
    Ok(found)
}

/// The response in `bytes`, which is all that came; `None` if it is no whole one.
pub fn parse_response(bytes: &[u8]) -> Option<Response> {
    let mut headers = [EMPTY_HEADER; MAX_HEADERS];
    let mut response = httparse::Response::new(&mut headers);
    let Ok(Status::Complete(head)) = response.parse(bytes) else { return None };
    let code = response.code?;
    let rest = bytes.get(head..)?;
    let body = match body_length(response.headers).ok()? {
        Some(len) => rest.get(..len)?,
        None => rest,
    };
    Some(Response::new(code, body.to_vec()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_whole_or_not_yet() {
        let text = b"PUT /a HTTP/1.1\r\nHost: x\r\ncontent-length: 4\r\n\r\nbodyrest";
        for cut in 0..text.len() - 4 {
            assert_eq!(parse_request(&text[..cut]), Ok(None), "{cut}");
        }
        let request = parse_request(text).unwrap().unwrap();
        assert_eq!((request.method.as_str(), request.path.as_str(), request.body), ("PUT", "/a", &b"body"[..]));
        let request = parse_request(b"GET / HTTP/1.0\r\n\r\n").unwrap().unwrap();
        assert_eq!((request.method.as_str(), request.body), ("GET", &b""[..]));
    }

    #[test]
    fn what_is_no_request_is_told_so_in_one_line() {
        let bad = |text: &[u8]| match parse_request(text) {
            Err(Bad(code, line)) => {
                assert!(!line.contains(|c: char| c.is_control()), "{line:?}");
                code
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(bad(b"\x16\x03\x01hello\r\n\r\n"), 400);
        assert_eq!(bad(b"GET / HTTP/9.9\r\n\r\n"), 400);
        assert_eq!(bad(&[b'A'; MAX_HEAD]), 431);
        assert_eq!(bad(&[b"GET / HTTP/1.1\r\n", &b"a: b\r\n".repeat(65)[..], b"\r\n"].concat()), 431);
        assert_eq!(bad(b"PUT / HTTP/1.1\r\nContent-Length: 16385\r\n\r\n"), 413);
        assert_eq!(bad(b"PUT / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n"), 413);
        for len in ["-1", "", "4x", "+4", "4, 4"] {
            assert_eq!(bad(format!("PUT / HTTP/1.1\r\nContent-Length: {len}\r\n\r\n").as_bytes()), 400, "{len}");
        }
        assert_eq!(bad(b"PUT / HTTP/1.1\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nabcde"), 400);
        assert_eq!(bad(b"PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"), 400);
    }

    #[test]
    fn any_bytes_end_in_an_answer_or_a_wait() {
        let mut state = 7u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize
        };
        let parts =
            [&b"GET "[..], b"PUT ", b"/", b" HTTP/1.1", b"\r\n", b"\n", b":", b"Content-Length", b"0", b"\xff", b"a"];
        for _ in 0..20_000 {
            let text: Vec<u8> = (0..next() % 24).flat_map(|_| parts[next() % parts.len()].to_vec()).collect();
            if let Ok(Some(request)) = parse_request(&text) {
                assert!(request.body.len() <= text.len() && !request.method.is_empty());
            }
            let _ = parse_response(&text);
        }
    }

    #[test]
    fn a_response_reads_back() {
        for response in
            [Response::new(200, b"{}".to_vec()), Response::new(204, Vec::new()), Response::new(400, b"x".to_vec())]
        {
            assert_eq!(parse_response(&response.bytes()), Some(response));
        }
        assert_eq!(parse_response(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort"), None);
        assert_eq!(parse_response(b"nonsense"), None);
    }
}
