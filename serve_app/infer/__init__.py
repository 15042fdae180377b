"""Files of requests, answered by an engine in this process or by a server: `warmpath infer`."""
