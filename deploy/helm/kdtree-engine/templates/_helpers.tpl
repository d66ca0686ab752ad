{{- define "kdt.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "kdt.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "kdt.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "kdt.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{- define "kdt.selector" -}}
app.kubernetes.io/name: {{ include "kdt.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kdt.labels" -}}
{{ include "kdt.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "kdt.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default (printf "%s-%s" .Chart.AppVersion .Values.backend) .Values.image.tag }}
{{- end -}}
{{- end }}

{{- define "kdt.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "kdt.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end }}

{{- /* Ranks that run in one pod. */ -}}
{{- define "kdt.ranksPerPod" -}}
{{- if .Values.multiNode.enabled }}{{ div (int .Values.tensorParallel) (int .Values.multiNode.nodes) }}{{ else }}{{ int .Values.tensorParallel }}{{ end -}}
{{- end }}

{{- define "kdt.modelDir" -}}
{{- if .Values.model.shipped -}}
/opt/kdtree-engine/models/kimi-tiny
{{- else -}}
/models{{ with .Values.model.path }}/{{ trimAll "/" . }}{{ end }}
{{- end -}}
{{- end }}

{{- define "kdt.drafterDir" -}}
{{- with .Values.model.drafterPath -}}
{{ if $.Values.model.shipped }}/opt/kdtree-engine/models/kimi-tiny{{ else }}/models{{ end }}/{{ trimAll "/" . }}
{{- end -}}
{{- end }}

{{- /* Address of each rank as the coordinator dials it, comma-separated. */ -}}
{{- define "kdt.workerAddresses" -}}
{{- $addresses := list -}}
{{- $perPod := int (include "kdt.ranksPerPod" .) -}}
{{- range $rank := until (int .Values.tensorParallel) -}}
{{- if $.Values.multiNode.enabled -}}
{{- $node := div $rank $perPod -}}
{{- $name := include "kdt.fullname" $ -}}
{{- $host := printf "%s-$(KDT_GROUP)%s.%s.%s" $name (eq $node 0 | ternary "" (printf "-%d" $node)) $name $.Release.Namespace -}}
{{- $addresses = append $addresses (printf "%s:%d" $host (add (int $.Values.multiNode.workerPort) (mod $rank $perPod))) -}}
{{- else -}}
{{- $addresses = append $addresses (printf "unix:/run/kdt/rank%d.sock" $rank) -}}
{{- end -}}
{{- end -}}
{{- join "," $addresses -}}
{{- end }}

{{- /* Probes that fail for this long mean that loading has failed, not that it is slow. */ -}}
{{- define "kdt.startupFailures" -}}
{{- $read := divf (mulf (float64 .Values.load.sizeGiB) 1024.0) (float64 .Values.load.readMiBPerSecond) -}}
{{- int (ceil (divf (addf $read (float64 .Values.load.extraSeconds)) (float64 .Values.probes.startup.periodSeconds))) -}}
{{- end }}

{{- define "kdt.gracePeriod" -}}
{{- add (int .Values.coordinator.drainTimeoutSeconds) (int .Values.coordinator.preStopSleepSeconds) 20 -}}
{{- end }}

{{- define "kdt.tolerations" -}}
{{- if .Values.tolerations -}}
{{ toYaml .Values.tolerations }}
{{- else if eq .Values.backend "cuda" -}}
- key: nvidia.com/gpu
  operator: Exists
  effect: NoSchedule
{{- end -}}
{{- end }}

{{- /* How coordinator and workers trust each other, as a JSON list: both take the same flags. */ -}}
{{- define "kdt.groupSecurity" -}}
{{- if not .Values.multiNode.enabled -}}
[]
{{- else if .Values.multiNode.tlsSecretName -}}
{{ list "--group_tls_cert=/etc/kdt/workers-tls/tls.crt" "--group_tls_key=/etc/kdt/workers-tls/tls.key" "--group_tls_ca=/etc/kdt/workers-tls/ca.crt" | toJson }}
{{- else -}}
["--allow_insecure_group"]
{{- end -}}
{{- end }}
