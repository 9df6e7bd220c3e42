// SPDX-License-Identifier: Apache-2.0
//! Which request is which command, and which reply is which response. The paths are those of Cloud Hypervisor's API, the
//! faults have Firecracker's form. Used by the server and the client, on either one's thread.

use serde::{Deserialize, Serialize};
use spec::{Command, Info, RemoveDevice, Reply, ResizeDisk, ResizeMemory, Vfio};

use crate::http::{Bad, Request, Response};

const INFO: &str = "/api/v1/vm.info";
const RESIZE_DISK: &str = "/api/v1/vm.resize-disk";
const RESIZE_MEMORY: &str = "/api/v1/vm.resize-memory";
const ADD_DEVICE: &str = "/api/v1/vm.add-device";
const REMOVE_DEVICE: &str = "/api/v1/vm.remove-device";

/// The body of a response to what was not done.
#[derive(Serialize, Deserialize)]
struct Fault {
    fault_message: String,
}

/// The command that `request` asks for.
///
/// # Errors
/// [`Bad`] for what is no command.
pub fn command(request: &Request<'_>) -> Result<Command, Bad> {
    match (request.method.as_str(), request.path.as_str()) {
        ("GET", INFO) => Ok(Command::Info),
        ("PUT", RESIZE_DISK) => Ok(Command::ResizeDisk(body(request.body)?)),
        ("PUT", RESIZE_MEMORY) => Ok(Command::ResizeMemory(body(request.body)?)),
        ("PUT", ADD_DEVICE) => Ok(Command::AddDevice(body(request.body)?)),
        ("PUT", REMOVE_DEVICE) => Ok(Command::RemoveDevice(body(request.body)?)),
        (_, INFO) => Err(Bad(405, format!("{INFO} is there to GET"))),
        (_, path @ (RESIZE_DISK | RESIZE_MEMORY | ADD_DEVICE | REMOVE_DEVICE)) => {
            Err(Bad(405, format!("{path} is there to PUT")))
        }
        _ => Err(Bad(
            404,
            format!("there are {INFO}, {RESIZE_DISK}, {RESIZE_MEMORY}, {ADD_DEVICE} and {REMOVE_DEVICE}, and no more"),
        )),
    }
}

fn body<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, Bad> {
    serde_json::from_slice(bytes).map_err(|e| Bad(400, format!("the body is not what it should be: {e}")))
}

/// The response to what can't be done.
pub fn refusal(code: u16, line: &str) -> Response {
    let fault_message = line.replace(|c: char| c.is_control(), " ");
    // A string always becomes JSON.
    Response::new(code, serde_json::to_vec(&Fault { fault_message }).unwrap_or_default())
}

/// The response that says `reply`.
pub fn response(reply: &Reply) -> Response {
    match reply {
        Reply::Done => Response::new(204, Vec::new()),
        Reply::Refused(line) => refusal(400, line),
        // Plain structs always become JSON.
        Reply::Info(info) => Response::new(200, serde_json::to_vec(info).unwrap_or_default()),
    }
}

/// The request that asks for `command`: method, path and body.
pub fn request(command: &Command) -> (&'static str, &'static str, Vec<u8>) {
    match command {
        Command::Info => ("GET", INFO, Vec::new()),
        // Plain structs always become JSON.
        Command::ResizeDisk(resize) => {
            ("PUT", RESIZE_DISK, serde_json::to_vec::<ResizeDisk>(resize).unwrap_or_default())
        }
        Command::ResizeMemory(resize) => {
            ("PUT", RESIZE_MEMORY, serde_json::to_vec::<ResizeMemory>(resize).unwrap_or_default())
        }
        Command::AddDevice(device) => ("PUT", ADD_DEVICE, serde_json::to_vec::<Vfio>(device).unwrap_or_default()),
        Command::RemoveDevice(device) => {
            ("PUT", REMOVE_DEVICE, serde_json::to_vec::<RemoveDevice>(device).unwrap_or_default())
        }
    }
}

/// What `response` says; `None` if it is none of this server's.
pub fn reply(response: &Response) -> Option<Reply> {
    match response.code {
        204 => Some(Reply::Done),
        200 => serde_json::from_slice::<Info>(&response.body).ok().map(Reply::Info),
        _ => serde_json::from_slice::<Fault>(&response.body).ok().map(|f| Reply::Refused(f.fault_message)),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn asked(method: &str, path: &str, body: &str) -> Result<Command, Bad> {
        command(&Request { method: method.into(), path: path.into(), body: body.as_bytes() })
    }

    #[test]
    fn commands_arrive_as_sent() {
        let disk = Command::ResizeDisk(ResizeDisk { id: "disk0".into(), desired_size: u64::MAX });
        let memory = Command::ResizeMemory(ResizeMemory { desired_size: 1 << 30 });
        let host = "0000:01:00.0".parse().unwrap();
        let add = Command::AddDevice(Vfio { host, iommu: spec::Iommu::Iommufd });
        let auto = Vfio { host, iommu: spec::Iommu::Auto };
        assert_eq!(asked("PUT", ADD_DEVICE, r#"{"host":"01:00.0"}"#), Ok(Command::AddDevice(auto)));
        let remove = Command::RemoveDevice(RemoveDevice { host, timeout: 3, force: true });
        let plain = RemoveDevice { host, timeout: 10, force: false };
        assert_eq!(asked("PUT", REMOVE_DEVICE, r#"{"host":"01:00.0"}"#), Ok(Command::RemoveDevice(plain)));
        for command in [Command::Info, disk, memory, add, remove] {
            let (method, path, body) = request(&command);
            assert_eq!(asked(method, path, std::str::from_utf8(&body).unwrap()), Ok(command));
        }
        for reply_ in [Reply::Done, Reply::Refused("no \"room\"".into()), Reply::Info(Info::default())] {
            assert_eq!(reply(&response(&reply_)), Some(reply_));
        }
    }

    #[test]
    fn what_is_no_command_has_its_code() {
        let code = |method, path, body| asked(method, path, body).unwrap_err().0;
        assert_eq!(code("GET", "/", ""), 404);
        assert_eq!(code("DELETE", INFO, ""), 405);
        assert_eq!(code("GET", RESIZE_DISK, ""), 405);
        assert_eq!(code("GET", RESIZE_MEMORY, ""), 405);
        assert_eq!(code("PUT", RESIZE_MEMORY, "{\"desired_size\":-1}"), 400);
        for body in ["", "{", "{}", "[]", r#"{"id":"a","desired_size":-1}"#, r#"{"id":"a","desired_size":1,"x":1}"#] {
            assert_eq!(code("PUT", RESIZE_DISK, body), 400, "{body}");
        }
        assert_eq!(code("GET", ADD_DEVICE, ""), 405);
        assert_eq!(code("PUT", ADD_DEVICE, r#"{"host":"nvme"}"#), 400);
        assert_eq!(code("PUT", REMOVE_DEVICE, r#"{"host":"01:00.0","timeout":-1}"#), 400);
        let deep = "[".repeat(10_000);
        assert_eq!(code("PUT", RESIZE_DISK, &deep), 400, "no depth of nesting is too much");
        assert_eq!(refusal(400, "a\nb").body, br#"{"fault_message":"a b"}"#);
    }
}
