// Starts Swagger UI on the page /docs.

const answer = await fetch("openapi.json");
const spec = await answer.json();
// Swagger UI 4 shows what is here of OpenAPI 3.1, but refuses it by its version.
spec.openapi = "3.0.3";
spec.servers = [{ url: new URL(".", location.href).href }]; // a proxy in front may add a prefix
SwaggerUIBundle({ dom_id: "#api", spec, deepLinking: true, validatorUrl: null });
