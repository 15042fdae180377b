{{- define "warmpath.labels" -}}
app.kubernetes.io/name: warmpath
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "warmpath.secret" -}}
{{ .Values.existingSecret | default .Release.Name }}
{{- end }}

{{- define "warmpath.settings" -}}
{{- range $name, $value := .Values.settings }}
{{- if not (kindIs "invalid" $value) }}
{{ toYaml (dict $name $value) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "warmpath.serve" -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: 8000
  keep_alive_timeout_s: 30
applications:
  - name: warmpath
    route_prefix: /
    import_path: serve_app:build_app
    args:
      {{- include "warmpath.settings" . | trim | nindent 6 }}
    deployments:
      - name: Ingress
        max_surge_percent: {{ .Values.surge.ingress }}
        user_config: &live
          {{- toYaml .Values.live | nindent 10 }}
      {{- range .Values.settings.models | default (list nil) }}
      - name: Replica{{ if kindIs "map" . }}-{{ include "warmpath.slug" (dict "entry" . "model" $.Values.settings.model) }}{{ end }}
        user_config: *live
        max_surge_percent: {{ $.Values.surge.replica }}
      {{- end }}
{{- end }}

{{- define "warmpath.slug" -}}
{{- $model := .entry.model | default .model | toString }}
{{- $own := hasPrefix "/" $model | ternary (trimSuffix ".gguf" (base $model)) $model }}
{{- $name := .entry.served_model_name | default $own }}
{{- regexReplaceAll "[^A-Za-z0-9_.-]" $name "-" }}
{{- if not (regexMatch "^[A-Za-z0-9_-][A-Za-z0-9_./ -]*$" $name) }}-{{ sha256sum $name | trunc 8 }}{{ end }}
{{- end }}

{{- define "warmpath.pod" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "warmpath.container" -}}
image: {{ .Values.image | quote }}
env:
  - name: WARMPATH_SECRET
    valueFrom: {secretKeyRef: {name: {{ include "warmpath.secret" . }}, key: secret}}
  - {name: RAY_SERVE_ENABLE_HA_PROXY, value: "1"}
  - {name: RAY_SERVE_THROUGHPUT_OPTIMIZED, value: "1"}
  - {name: RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S, value: "1"}
  - {name: RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S, value: "60"}
  - {name: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, value: "serve_app.ingress.client_headers:middlewares"}
  {{- with .Values.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: {{ .Values.readOnlyRootFilesystem }}
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "warmpath.scratch" -}}
- {name: scratch, mountPath: /tmp, subPath: tmp}
{{- range list ".config" ".local" ".nv" ".ray" ".triton" ".cache/flashinfer" ".cache/huggingface" ".cache/torch" ".cache/vllm" }}
- {name: scratch, mountPath: /home/warmpath/{{ . }}, subPath: {{ base . | trimPrefix "." }}}
{{- end }}
{{- end }}

{{- define "warmpath.open" -}}
{{- if or .Values.open .Values.live.tenants .Values.settings.tenants }}true{{ end }}
{{- end }}
